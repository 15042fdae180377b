"""Replicas of one model in virtual time: requests arrive, a policy chooses, replicas come and go by a rule.

A replica costs from the decision that starts it until its last answer has ended.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from router.load import Floats
from router.observe import RecentTimes, RequestTimes
from router.protocol.autoscaling import ReplicaFigures
from serve_app.replay.copies import hand_over, warm
from serve_app.replay.pool import Holders, SegmentPool, TierStore
from serve_app.replay.prompts import ModelTraffic
from serve_app.replay.replica import ReplayJob, ReplayReplica
from serve_app.replay.reuse import ReusedSegments
from serve_app.replay.router import ReplayRouter
from serve_app.replay.setup import CacheTier, Setup

SAMPLES = 400
"""Moments of a run at which its replicas and queue are noted."""
RECENT_S = 600.0
"""Rules may ask for first tokens so long ago."""


@dataclass(slots=True)
class Replayed:
    """What became of the requests of one simulated cluster, in their order. ``ttft_s``: nan where none came.

    ``samples``: moment, replicas that run, that start, waiting requests; ``sizes``: moment and wanted replicas at each
    change; ``replica_s``: paid for; ``end_s``: of the last answer.
    """

    ttft_s: Floats
    own_s: Floats
    cached_tokens: npt.NDArray[np.int64]
    predicted_tokens: npt.NDArray[np.int64]
    served_by: npt.NDArray[np.int32]
    samples: list[tuple[float, int, int, int]] = field(default_factory=list)
    sizes: list[tuple[float, int]] = field(default_factory=list)
    replica_s: float = 0.0
    end_s: float = 0.0
    too_long: int = 0


class PoolLoad(Protocol):
    """What others' rules of autoscaling see. ``wanted``: replicas that run or start."""

    wanted: int

    def figures(self, now_s: float) -> dict[str, ReplicaFigures]:
        """Return what each running replica would report."""

    def ongoing(self) -> int:
        """Return the requests that wait or are answered."""

    def waiting_without_replica(self) -> int:
        """Return the requests for which there is no replica yet."""

    def recent_ttft_s(self, now_s: float, window_s: float) -> list[float]:
        """Return the measured times of the first tokens within the last ``window_s``."""

    def recent_tpot_s(self, now_s: float, window_s: float) -> list[float]:
        """Return the seconds a token of running answers, as of now."""


class PoolView(PoolLoad, Protocol):
    """What ours sees, too."""

    def demand(self, now_s: float) -> tuple[RecentTimes, int]:
        """Return the last minute's requests, and the working set's tokens."""


class ScalingRule(Protocol):
    """Says how many replicas there should be, each ``period_s``."""

    period_s: float

    def target(self, pool: PoolView, now_s: float) -> int:
        """Return the number."""


@dataclass(slots=True, eq=False)
class _Life:
    replica: ReplayReplica
    born_s: float
    number: int
    running: bool = False
    leaving: bool = False


class ReplayCluster:
    """One run. ``rule`` None: ``setup.replicas``, and ``setup.changes`` of them."""

    def __init__(
        self,
        prompts: ModelTraffic,
        setup: Setup,
        rule: ScalingRule | None = None,
        *,
        first: int | None = None,
        seed: int = 0,
        progress: Callable[[int], object] = lambda _: None,
    ) -> None:
        self._prompts, self.setup, self._rule, self._progress = prompts, setup, rule, progress
        self._size = prompts.block_tokens
        self._blocks = max(setup.pool_tokens // self._size, 1)
        self._holders = Holders()
        self._router = ReplayRouter(setup, prompts.sizes, self._holders, self._size, seed)
        self._events: list[tuple[float, int, Any]] = []
        self._order = 0
        self._lives: dict[str, _Life] = {}
        self._free_bits: list[int] = []
        self._born = 0
        self._held_back: deque[ReplayJob] = deque()
        self._times = RequestTimes()
        self._recent: deque[tuple[float, float]] = deque()
        self._shared_tiers = {tier: self._store(tier) for tier in setup.tiers if tier.shared}
        self._reused = ReusedSegments(prompts.sizes)
        self.wanted = 0
        count = len(prompts)
        self.result = Replayed(
            np.full(count, np.nan), np.zeros(count), np.zeros(count, np.int64), np.zeros(count, np.int64),
            np.full(count, -1, np.int32),
        )  # fmt: skip
        self._changes = deque(setup.changes)
        self._resize(setup.replicas if first is None else first, 0.0, start_s=0.0)

    # What a rule sees.

    def figures(self, now_s: float) -> dict[str, ReplicaFigures]:
        """See ``PoolView``."""
        found: dict[str, ReplicaFigures] = {}
        rates, size = self.setup.rates, self._size
        for name, life in self._lives.items():
            replica = life.replica
            if not life.running or life.leaving:
                continue
            queued, _ = replica.load(now_s)
            found[name] = ReplicaFigures(
                version=0,
                arrived_tokens=replica.arrived_tokens,
                queued_tokens=queued,
                prefill_tokens_per_s=rates.prefill_tokens_per_s,
                running=replica.running,
                waiting=replica.waiting,
                slots=rates.max_num_seqs,
                pool_tokens=self._blocks * size,
                used_tokens=replica.used_tokens(),
                pinned_tokens=0,
                pin_budget_tokens=0,
                hands_over=float(self.setup.hand_over),
            )
        return found

    def demand(self, now_s: float) -> tuple[RecentTimes, int]:
        """See ``PoolView``."""
        return self._times.recent(now_s), self._reused.blocks(now_s) * self._size

    def ongoing(self) -> int:
        """See ``PoolView``."""
        return sum(life.replica.unfinished for life in self._lives.values()) + len(self._held_back)

    def waiting_without_replica(self) -> int:
        """See ``PoolView``."""
        return len(self._held_back)

    def recent_ttft_s(self, now_s: float, window_s: float) -> list[float]:
        """See ``PoolView``."""
        return [ttft_s for at_s, ttft_s in self._recent if at_s >= now_s - window_s]

    def recent_tpot_s(self, now_s: float, window_s: float) -> list[float]:
        """See ``PoolView``."""
        return [life.replica.token_s for life in self._lives.values() if life.replica.running]

    # The run.

    def run(self) -> Replayed:
        """Let every request arrive, and all answers end."""
        prompts, events, result = self._prompts, self._events, self.result
        arrivals, count = prompts.arrival_s, len(prompts)
        last_s = float(arrivals[-1]) if count else 0.0
        step_s = max(last_s / SAMPLES, 1e-3)
        if self._rule is not None:
            self._at(self._rule.period_s, "rule")
        self._at(0.0, "sample")
        if self._changes:
            self._at(self._changes[0][0], "change")
        place = 0
        while place < count or events:
            arrival_s = arrivals[place] if place < count else None
            if arrival_s is not None and (not events or arrival_s <= events[0][0]):
                self._arrive(place, float(arrival_s))
                place += 1
                if not place % 1000:
                    self._progress(place)
                continue
            moment_s, _, what = heapq.heappop(events)
            if isinstance(what, ReplayReplica):
                if what.due_s == moment_s:
                    what.tick(moment_s)
                    self._router.loads.changed(what)
                continue
            over = place == count and not self._awaited(bool(events))
            if what == "sample":
                self._sample(moment_s)
                if not over:
                    self._at(moment_s + step_s, "sample")
            elif what == "rule":
                self._ask(moment_s)
                if not over and self._rule is not None:
                    self._at(moment_s + self._rule.period_s, "rule")
            elif what == "change":
                self._resize(self._changes.popleft()[1], moment_s, start_s=0.0)
                if self._changes:
                    self._at(self._changes[0][0], "change")
            else:
                self._joined(what, moment_s)
        end_s = max(result.end_s, last_s)
        result.end_s = end_s
        for life in self._lives.values():
            result.replica_s += max(end_s - life.born_s, 0.0)
        self._progress(count)
        return result

    def _awaited(self, more: bool) -> bool:
        """Return whether there are requests, and something may still answer them. ``more``: events are to come."""
        return self.ongoing() > len(self._held_back) or bool(self._held_back and (more or self._rule is not None))

    def _at(self, moment_s: float, what: object) -> None:
        self._order += 1
        heapq.heappush(self._events, (moment_s, self._order, what))

    def _wake(self, replica: ReplayReplica, moment_s: float) -> None:
        self._order += 1
        heapq.heappush(self._events, (moment_s, self._order, replica))

    def _arrive(self, number: int, now_s: float) -> None:
        job = self._prompts.job(number, grows=self.setup.answers_cached)
        if -(-(job.prompt_tokens + job.output_tokens) // self._size) > self._blocks:
            self.result.too_long += 1
            return
        if not self._router.loads.replica_ids:
            self._held_back.append(job)
            if self._rule is not None and not self.wanted:
                self._ask(now_s)
            return
        self._send(job, now_s)

    def _send(self, job: ReplayJob, now_s: float) -> None:
        decision = self._router.decide(job, now_s)
        replica = decision.replica
        if decision.pulled_from is not None:
            job.pulled_blocks = decision.pulled_blocks
            rates = self.setup.rates
            job.pulled_s = decision.pulled_from.step_end_s(now_s) + rates.overhead_s
            job.pulled_s += decision.pulled_blocks * self._size / rates.pull_tokens_per_s
            decision.pulled_from.pool.demote(job.path, decision.pulled_blocks)
        self.result.predicted_tokens[job.number] = decision.predicted_blocks * self._size
        if self._rule is not None:
            self._times.add(decision.estimated_ttft_s, decision.own_s, now_s)
            self._reused.add(job.path, decision.best_blocks, now_s)
        self._router.begun(job, replica)
        replica.submit(job, now_s)
        self._router.loads.changed(replica)

    def _first_token(self, replica: ReplayReplica, job: ReplayJob, now_s: float) -> None:
        number, result = job.number, self.result
        ttft_s = now_s - job.arrival_s + self.setup.rates.overhead_s
        result.ttft_s[number] = ttft_s
        result.cached_tokens[number] = job.cached_tokens
        result.served_by[number] = self._lives[replica.name].number
        if self._rule is not None:
            self._recent.append((now_s, ttft_s))
            while self._recent[0][0] < now_s - RECENT_S:
                self._recent.popleft()
        self._router.computed(job, replica)

    def _ended(self, replica: ReplayReplica, job: ReplayJob, now_s: float) -> None:
        self.result.end_s = max(self.result.end_s, now_s)
        life = self._lives[replica.name]
        if life.leaving and not replica.unfinished:
            self._bury(life, now_s)

    def _sample(self, now_s: float) -> None:
        running = sum(life.running and not life.leaving for life in self._lives.values())
        waiting = sum(life.replica.waiting for life in self._lives.values()) + len(self._held_back)
        self.result.samples.append((now_s, running, max(self.wanted - running, 0), waiting))

    # Replicas come and go.

    def _ask(self, now_s: float) -> None:
        assert self._rule is not None
        wanted = self._rule.target(self, now_s)
        if wanted != self.wanted:
            self._resize(wanted, now_s, start_s=self.setup.start_s)

    def _resize(self, wanted: int, now_s: float, *, start_s: float) -> None:
        self.wanted = wanted
        self.result.sizes.append((now_s, wanted))
        staying = [life for life in self._lives.values() if not life.leaving]
        for _ in range(wanted - len(staying)):
            life = self._begin(now_s)
            if start_s:
                self._at(now_s + start_s + self._join_s(life), life)
            else:
                self._joined(life, now_s)
        # Serve's order: those that do not run yet, then the newest.
        going = sorted(staying, key=lambda life: (life.running, -life.number))
        for life in going[: max(len(staying) - wanted, 0)]:
            self._leave(life, now_s)

    def _begin(self, now_s: float) -> _Life:
        setup = self.setup
        bit = self._free_bits.pop() if self._free_bits else 1 << len(self._lives)
        tiers = [self._shared_tiers.get(tier) or self._store(tier) for tier in setup.tiers]
        pool = SegmentPool(self._blocks, self._prompts.sizes, bit, self._holders, tiers)
        replica = ReplayReplica(
            f"replica-{self._born}",
            setup.rates,
            pool,
            self._size,
            shortest_first=setup.shortest_first,
            wake=self._wake,
            first_token=self._first_token,
            ended=self._ended,
        )
        life = _Life(replica, now_s, self._born)
        self._lives[replica.name] = life
        self._born += 1
        return life

    def _store(self, tier: CacheTier) -> TierStore:
        return TierStore(tier, tier.tokens // self._size)

    def _joined(self, life: _Life, now_s: float) -> None:
        if life.leaving or life.running:
            return
        life.running = True
        if self.setup.warm_join and self.setup.rates.pull_tokens_per_s:
            self._warm(life.replica, now_s)
        self._announce()
        while self._held_back:
            self._send(self._held_back.popleft(), now_s)

    def _leave(self, life: _Life, now_s: float) -> None:
        life.leaving = True
        self._announce()
        if life.running and self.setup.hand_over and self.setup.rates.pull_tokens_per_s:
            self._hand_over(life.replica, now_s)
        if not life.replica.unfinished:
            self._bury(life, now_s)

    def _bury(self, life: _Life, now_s: float) -> None:
        self.result.replica_s += now_s - life.born_s
        life.replica.pool.clear()
        del self._lives[life.replica.name]
        self._free_bits.append(life.replica.pool.bit)

    def _announce(self) -> None:
        self._router.replicas([life.replica for life in self._lives.values() if life.running and not life.leaving])

    # Copies between replicas that come and go.

    def _join_s(self, life: _Life) -> float:
        """Return the time that a new replica takes for the others' hottest prefixes."""
        rates = self.setup.rates
        if not self.setup.warm_join or not rates.pull_tokens_per_s:
            return 0.0
        held = max((sum(other.replica.pool.held.values()) for other in self._lives.values()), default=0)
        return min(held * self._size / rates.pull_tokens_per_s, self.setup.warm_join_s)

    def _warm(self, replica: ReplayReplica, now_s: float) -> None:
        others = [life.replica.pool for life in self._lives.values() if life.running and life.replica is not replica]
        warm(replica.pool, others, self._copied_blocks(self.setup.warm_join_s), now_s)

    def _hand_over(self, leaving: ReplayReplica, now_s: float) -> None:
        others = [life.replica.pool for life in self._lives.values() if life.running and not life.leaving]
        blocks = self._copied_blocks(self.setup.hand_over_s)
        hand_over(leaving.pool, others, blocks, now_s)

    def _copied_blocks(self, seconds: float) -> int:
        return int(self.setup.rates.pull_tokens_per_s * seconds) // self._size
