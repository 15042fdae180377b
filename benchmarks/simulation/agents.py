"""Agents' sessions on a simulated cluster, closed loop: a turn starts a pause after the previous answer."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from math import inf
from operator import mul
from random import Random
from statistics import fmean

from benchmarks.common.agent_sessions import (
    AWAKE_S,
    AgentSession,
    AgentStream,
    AgentTurn,
    job_figures,
    job_s,
    random_arrivals,
    read_sessions,
    requests_of,
    working_set_tokens,
)
from benchmarks.common.harness import note
from benchmarks.common.virtual_clock import VirtualClock
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
        cached = turn.known_tokens or (session.opening_tokens if not at else 0)
        computed_s = max(1, turn.prompt_tokens - cached) / settings.prefill_tokens_per_s
        return computed_s + turn.output_tokens * settings.decode_token_s

    return job_s(session, answer_s, longest_pause_s)


LONG, SHORT, SPAN_S = 20, 100, 1500.0
"""Sessions of one tenant: long ones of 60 turns begin in the first minute, short ones of 5 turns during the span."""


def make_long_and_short(settings: ClusterSettings, long: int = LONG, short: int = SHORT) -> SimulatedLoad:
    """Return made sessions. Each begins with 60,000 or 40,000 tokens, and 3,000 more a turn, 10 s after an answer."""
    rng, ids, size = Random(settings.seed), count(), settings.block_size

    def session(turns: int, tokens: int) -> AgentSession:
        made: list[AgentTurn] = []
        hashes = [*opening, *(next(ids) for _ in range(tokens // size - len(opening)))]
        for turn in range(turns):
            pause_s, cached = (rng.expovariate(0.1), made[-1].prompt_tokens) if turn else (0.0, 0)
            made.append(AgentTurn(len(hashes) * size, rng.randrange(50, 400), pause_s, tuple(hashes), cached))
            hashes += (next(ids) for _ in range(max(1, int(rng.expovariate(size / 3000)))))
        return AgentSession((AgentStream(tuple(made)),), len(opening) * size)

    opening = [next(ids) for _ in range(16)]
    chosen = [*(session(60, 60_000) for _ in range(long)), *(session(5, 40_000) for _ in range(short))]
    arrivals_s = [*(rng.uniform(0.0, 60.0) for _ in range(long)), *(rng.uniform(60.0, SPAN_S) for _ in range(short))]
    ideal_s = [_ideal_s(one, settings) for one in chosen]
    traced = requests_of(chosen, 1)
    requests = dict(zip(traced, prepare(list(traced.values()), size), strict=True))
    most = [one.streams[0].turns[-1].prompt_tokens for one in chosen]
    at_once = sum(most[:long]) + sum(map(mul, most[long:], ideal_s[long:])) / SPAN_S
    return SimulatedLoad(chosen, arrivals_s, requests, ideal_s, round(at_once / size))


def simulate_long_and_short(settings: ClusterSettings, pools: Sequence[float]) -> dict[str, dict[str, float]]:
    """Return the job times of all, of short and of long sessions, by pool, each a part of the working set."""
    load, rows = make_long_and_short(settings), {}
    for pool in pools:
        blocks = round(pool * load.working_set_blocks / settings.replicas)
        agents = Agents(Cluster(replace(settings, blocks=blocks), CONTENDERS["warmpath"]), load)
        row = agents.run()
        jobs = agents.slowdowns()
        rows[f"warmpath, pool {pool:g}"] = {**row, "short": fmean(jobs[LONG:]), "long": fmean(jobs[:LONG])}
    return rows


def go_on(clock: VirtualClock, session: AgentSession, at: int, turn: int, send: Callable[[int, int], None]) -> int:
    """Schedule what an answer begins: its stream's next turn, and sub-agents. Return how many more streams are open."""
    streams = session.streams
    begun = [other for other, stream in enumerate(streams) if not at and other and stream.after == turn]
    for other in begun:
        clock.after(streams[other].delay_s, partial(send, other, 0))
    if turn + 1 == len(streams[at].turns):
        return len(begun) - 1
    clock.after(streams[at].turns[turn + 1].pause_s, partial(send, at, turn + 1))
    return len(begun)


class Agents:
    """Runs a load on a contender's cluster, once."""

    def __init__(self, cluster: Cluster, load: SimulatedLoad) -> None:
        self._cluster = cluster
        self._closes = cluster.contender.closes
        self._load = load
        self._began_s: dict[int, float] = {}
        self._ended_s: dict[int, float] = defaultdict(float)
        self._where: dict[int, tuple[int, int, int]] = {request.number: key for key, request in load.requests.items()}
        self._returns: dict[tuple[int, int], tuple[float, bytes]] = {}
        """By session and stream: the time of the next turn, and the last prompt's chain."""
        if cluster.contender.oracle:
            for replica in cluster.replicas.values():
                replica.returning = lambda: [chain for _, chain in sorted(self._returns.values(), reverse=True)]

    def run(self) -> dict[str, float]:
        """Return the figures of all sessions."""
        self._cluster.on_end = self._ended
        clock = self._cluster.clock
        for number, arrival_s in enumerate(self._load.arrivals_s):
            clock.at(arrival_s, partial(self._send, number, 0, 0))
        clock.run()
        assert len(self._cluster.outcome.ttft_s) == len(self._load.requests), "some requests had no answer"
        return {**self._cluster.outcome.summary(), **job_figures(self.slowdowns())}

    def slowdowns(self) -> list[float]:
        """Return the job times of all sessions, each divided by its ideal one."""
        ideal_s = enumerate(self._load.ideal_s)
        return [(self._ended_s[number] - self._began_s[number]) / ideal for number, ideal in ideal_s]

    def _send(self, session: int, stream: int, turn: int) -> None:
        now_s = self._cluster.clock.now_s
        self._began_s.setdefault(session, now_s)
        request = self._load.requests[session, stream, turn]
        name = f"{session}.{stream}" if self._closes else ""
        self._cluster.send(replace(request, trace=replace(request.trace, arrival_s=now_s), session=name))

    def _ended(self, job: Job) -> None:
        session, at, turn = self._where[job.request.number]
        clock, turns = self._cluster.clock, self._load.sessions[session].streams[at].turns
        self._ended_s[session] = max(self._ended_s[session], clock.now_s)
        self._returns.pop((session, at), None)
        if turn + 1 < len(turns):
            self._returns[session, at] = clock.now_s + turns[turn + 1].pause_s, job.request.block_hashes
        elif self._closes:
            self._cluster.close(job.request.trace.tenant, job.request.session)
        go_on(clock, self._load.sessions[session], at, turn, partial(self._send, session))


CONTENDERS = {
    "warmpath": Contender(DEFAULT_POLICY, shortest_first=True, pull=True, admission=True),
    "closes": Contender(DEFAULT_POLICY, shortest_first=True, pull=True, admission=True, closes=True),
    "oracle": Contender(DEFAULT_POLICY, shortest_first=True, pull=True, admission=True, oracle=True),
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
                Cluster(replace(settings, blocks=blocks), contender), load
            ).run()
            note(f"{name}, pool {pool:g}: {_line(row)}")
    return results


def agents_summary(results: dict[str, dict[str, float]]) -> str:
    """Return a sentence with all rows."""
    rows = "; ".join(f"{name}: {_line(row)}" for name, row in results.items())
    return f"job time over that of an unlimited cache without queue, and hit rate. {rows}."


def _line(row: dict[str, float]) -> str:
    kinds = "".join(f", {kind} {row[kind]:.2f}" for kind in ("short", "long") if kind in row)
    return f"{row['job_time_mean']:.2f} (p90 {row['job_time_p90']:.2f}{kinds}), {row['hit_rate']:.1%}"
