"""Sessions as aiperf's AgentX plays them, on a simulated cluster: some at once, and at each one's end the next begins.

Each play has prompts of its own. The first ones begin at random turns.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, cycle
from random import Random
from statistics import fmean

from benchmarks.common.agent_sessions import AgentSession
from benchmarks.common.report import percentile
from benchmarks.simulation.agents import go_on
from benchmarks.simulation.cluster import Cluster
from benchmarks.simulation.replica import Job
from benchmarks.simulation.settings import prepare
from serve_app.checkpoints.reuse import TRACE_BLOCK_TOKENS, TraceRequest


@dataclass(slots=True)
class _Play:
    """``first_id``: is added to the session's block ids; ``seen``: the ids that an endless cache has."""

    session: AgentSession
    first_id: int
    open_streams: int = 1
    seen: set[int] = field(default_factory=set)


class AgentX:
    """Runs a load on a cluster, once. No request begins after ``duration_s``."""

    def __init__(self, cluster: Cluster, sessions: Sequence[AgentSession], at_once: int, duration_s: float) -> None:
        self._cluster = cluster
        self._next = cycle(sessions)
        self._at_once = at_once
        self._duration_s = duration_s
        self._rng = Random(cluster.settings.seed)
        turns = [turn for session in sessions for stream in session.streams for turn in stream.turns]
        self._ids = count(0, 1 + max(max(turn.hash_ids) for turn in turns))
        self._numbers = count()
        self._sent: dict[int, tuple[_Play, int, int]] = {}
        self._answers_s: list[float] = []
        self._known_tokens = 0

    def run(self) -> dict[str, float]:
        """Return aiperf's figures: times in ms, ``theoretical``: the hit rate of an endless cache."""
        self._cluster.on_end = self._answered
        for _ in range(self._at_once):
            self._begin(anywhere=True)
        self._cluster.clock.run()
        outcome = self._cluster.outcome
        times_ms = [1000 * ttft_s for ttft_s in outcome.ttft_s.values()]
        return {
            "delivered": outcome.cached_tokens / outcome.prompt_tokens,
            "theoretical": self._known_tokens / outcome.prompt_tokens,
            "of_theoretical": outcome.cached_tokens / self._known_tokens,
            "ttft_ms_mean": fmean(times_ms),
            "ttft_ms_p50": percentile(times_ms, 50),
            "ttft_ms_p90": percentile(times_ms, 90),
            "answer_ms_mean": 1000 * fmean(self._answers_s),
            "requests": len(times_ms),
        }

    def _begin(self, *, anywhere: bool = False) -> None:
        play = _Play(next(self._next), next(self._ids))
        self._send(play, 0, self._rng.randrange(len(play.session.streams[0].turns)) if anywhere else 0)

    def _send(self, play: _Play, at: int, turn: int) -> None:
        now_s, number = self._cluster.clock.now_s, next(self._numbers)
        if now_s >= self._duration_s:
            return
        next_turn = play.session.streams[at].turns[turn]
        ids = tuple(play.first_id + block for block in next_turn.hash_ids)
        full = ids[: (next_turn.prompt_tokens - 1) // TRACE_BLOCK_TOKENS]
        cached = next((place for place, block in enumerate(full) if block not in play.seen), len(full))
        self._known_tokens += cached * TRACE_BLOCK_TOKENS
        play.seen.update(full)
        [request] = prepare([TraceRequest(now_s, next_turn.prompt_tokens, next_turn.output_tokens, ids)])
        self._sent[number] = play, at, turn
        self._cluster.send(replace(request, number=number))

    def _answered(self, job: Job) -> None:
        clock = self._cluster.clock
        self._answers_s.append(clock.now_s - job.arrival_s)
        play, at, turn = self._sent.pop(job.request.number)
        play.open_streams += go_on(clock, play.session, at, turn, partial(self._send, play))
        if not play.open_streams:
            self._begin()
