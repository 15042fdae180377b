"""Agents' sessions on a simulated cluster, closed loop: a turn starts a pause after the previous answer."""

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from random import Random

from benchmarks.common.agent_sessions import (
    AWAKE_S,
    AgentSession,
    job_figures,
    job_s,
    random_arrivals,
    read_sessions,
    requests_of,
    working_set_tokens,
)
from benchmarks.simulation.cluster import Cluster
from benchmarks.simulation.replica import Job
from benchmarks.simulation.settings import ClusterSettings, Contender, SimulatedRequest, prepare
from router.settings import DEFAULT_POLICY


@dataclass(frozen=True, slots=True)
class SimulatedLoad:
    """Prepared sessions with their arrivals. ``requests``: by session, stream and turn."""

    sessions: Sequence[AgentSession]
    arrivals_s: Sequence[float]
    requests: dict[tuple[int, int, int], SimulatedRequest]
    ideal_s: Sequence[float]
    working_set_blocks: int


def make_load(
    sessions: Sequence[AgentSession], settings: ClusterSettings, running: float, tenants: int
) -> SimulatedLoad:
    """Let sessions arrive at random, so that about ``running`` would run concurrently on an unlimited cache."""
    rng = Random(settings.seed)
    chosen = list(sessions)
    rng.shuffle(chosen)
    ideal_s = [_ideal_s(session, settings) for session in chosen]
    awake_s = [_ideal_s(session, settings, AWAKE_S) for session in chosen]
    arrivals_s = random_arrivals(awake_s, running, rng)
    traced = requests_of(chosen, tenants)
    requests = dict(zip(traced, prepare(list(traced.values()), settings.block_size), strict=True))
    blocks = round(working_set_tokens(chosen, awake_s, running) / settings.block_size)
    return SimulatedLoad(chosen, arrivals_s, requests, ideal_s, blocks)


def _ideal_s(session: AgentSession, settings: ClusterSettings, longest_pause_s: float = inf) -> float:
    """Return a session's time on an unlimited cache without a queue."""

    def answer_s(at: int, number: int) -> float:
        turn = session.streams[at].turns[number]
        known = turn.known_tokens or (session.opening_tokens if not at else 0)
        computed_s = max(1, turn.prompt_tokens - known) / settings.prefill_tokens_per_s
        return computed_s + turn.output_tokens * settings.decode_token_s

    return job_s(session, answer_s, longest_pause_s)


class Agents:
    """Runs a load on a cluster, once. ``closes``: clients name each stream of a session, and close it at its end."""

    def __init__(self, cluster: Cluster, load: SimulatedLoad, *, closes: bool = False) -> None:
        self._cluster = cluster
        self._closes = closes
        self._load = load
        self._began_s: dict[int, float] = {}
        self._ended_s: dict[int, float] = defaultdict(float)
        self._where: dict[int, tuple[int, int, int]] = {request.number: key for key, request in load.requests.items()}

    def run(self) -> dict[str, float]:
        """Return the figures of all sessions."""
        self._cluster.on_end = self._ended
        clock = self._cluster.clock
        for number, arrival_s in enumerate(self._load.arrivals_s):
            clock.at(arrival_s, partial(self._send, number, 0, 0))
        clock.run()
        assert len(self._cluster.outcome.ttft_s) == len(self._load.requests), "some requests had no answer"
        slowdowns = [
            (self._ended_s[number] - self._began_s[number]) / ideal_s
            for number, ideal_s in enumerate(self._load.ideal_s)
        ]
        return {**self._cluster.outcome.summary(), **job_figures(slowdowns)}

    def _send(self, session: int, stream: int, turn: int) -> None:
        now_s = self._cluster.clock.now_s
        self._began_s.setdefault(session, now_s)
        request = self._load.requests[session, stream, turn]
        name = f"{session}.{stream}" if self._closes else ""
        self._cluster.send(replace(request, trace=replace(request.trace, arrival_s=now_s), session=name))

    def _ended(self, job: Job) -> None:
        session, at, turn = self._where[job.request.number]
        clock, streams = self._cluster.clock, self._load.sessions[session].streams
        self._ended_s[session] = max(self._ended_s[session], clock.now_s)
        turns = streams[at].turns
        if turn + 1 < len(turns):
            clock.after(turns[turn + 1].pause_s, partial(self._send, session, at, turn + 1))
        elif self._closes:
            self._cluster.close(job.request.trace.tenant, job.request.session)
        if at == 0:
            for other, stream in enumerate(streams[1:], 1):
                if stream.after == turn:
                    clock.after(stream.delay_s, partial(self._send, session, other, 0))


CONTENDERS = {
    "warmpath": Contender(DEFAULT_POLICY, shortest_first=True, pull=True, admission=True),
    "closes": Contender(DEFAULT_POLICY, shortest_first=True, pull=True, admission=True, closes=True),
    "no_admission": Contender(DEFAULT_POLICY, shortest_first=True, pull=True),
    "first_come": Contender(DEFAULT_POLICY),
    "power_of_two": Contender("power_of_two"),
}
"""By row name. The replicas of the last two serve first come, first served, with vLLM's order of eviction."""


def simulate_agents(
    settings: ClusterSettings, pools: Sequence[float], sessions: int, running: float, tenants: int
) -> dict[str, dict[str, float]]:
    """Run every contender with pools of these fractions of the working set; return figures by row name."""
    load = make_load(read_sessions()[:sessions], settings, running, tenants)
    results = {}
    for pool in pools:
        blocks = round(pool * load.working_set_blocks / settings.replicas)
        for name, contender in CONTENDERS.items():
            row = results[f"{name}, pool {pool:g}"] = Agents(
                Cluster(replace(settings, blocks=blocks), contender), load, closes=contender.closes
            ).run()
            print(f"{name}, pool {pool:g}: {_line(row)}", file=sys.stderr, flush=True)
    return results


def agents_summary(results: dict[str, dict[str, float]]) -> str:
    """Return a sentence with all rows."""
    rows = "; ".join(f"{name}: {_line(row)}" for name, row in results.items())
    return f"Simulated: job time over that of an unlimited cache without queue, and hit rate. {rows}."


def _line(row: dict[str, float]) -> str:
    return f"{row['job_time_mean']:.2f} (p90 {row['job_time_p90']:.2f}), {row['hit_rate']:.1%}"
