"""A pool as queues alone, for sizes at which routers and caches would take hours: no cache, first come, first served.

Each request takes the time that an unlimited cache would leave of it, at the replica that is free first. Starts,
drains and costs are those of ``pool``; the rules, and what they see, too.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.simulation.day.view import START_S, DayOutcome, Rule
from router.observe.demand import RecentTimes, RequestTimes
from router.protocol.autoscaling import ReplicaFigures


@dataclass(slots=True)
class _Replica:
    name: str
    born_s: float
    free_s: float
    starts_s: deque[float] = field(default_factory=deque)
    ends_s: deque[float] = field(default_factory=deque)
    arrived_s: float = 0.0


class QueuePool:
    """Run it once. ``first``: replicas at the beginning; ``most``: there may be."""

    def __init__(self, rule: Rule, *, first: int, most: int) -> None:
        self.most = most
        self.wanted = 0
        self.outcome = DayOutcome()
        self._rule = rule
        self._times = RequestTimes()
        self._born = 0
        self._now_s = 0.0
        self._running: list[_Replica] = []
        self._starting: list[tuple[float, int, _Replica]] = []
        self._size(first, start_s=0.0)
        self._take_in(0.0)

    def figures(self) -> dict[str, ReplicaFigures]:
        """Return what each running replica would report: a token is a second here."""
        found = {}
        for each in self._running:
            queued_s = max(each.free_s - self._now_s, 0.0)
            found[each.name] = ReplicaFigures(
                0, each.arrived_s, queued_s, 1.0, 0, len(each.starts_s), 0, 0, 0, 0, 0, 1
            )  # fmt: skip
        return found

    def demand(self) -> list[tuple[RecentTimes, int]]:
        """Return what the requests of the last minute were like."""
        return [(self._times.recent(self._now_s), 0)]

    def ongoing(self) -> int:
        """Return the requests that wait or are computed."""
        return sum(len(each.ends_s) for each in self._running)

    def run(self, requests: Sequence[tuple[float, float]]) -> DayOutcome:
        """Let requests arrive: (moment, seconds of prefill); then wait until the rule has made the pool small."""
        outcome, tick_s = self.outcome, self._rule.interval_s
        for arrival_s, own_s in requests:
            while tick_s <= arrival_s:
                self._tick(tick_s)
                tick_s += self._rule.interval_s
            self._take_in(arrival_s)
            chosen = self._running[0]
            for each in self._running:
                if each.free_s < chosen.free_s:
                    chosen = each
                if chosen.free_s <= arrival_s:
                    break
            start_s = max(chosen.free_s, arrival_s)
            chosen.free_s = start_s + own_s
            chosen.starts_s.append(start_s)
            chosen.ends_s.append(chosen.free_s)
            chosen.arrived_s += own_s
            outcome.ttft_s.append(chosen.free_s - arrival_s)
            outcome.gone_s = max(outcome.gone_s, chosen.free_s)
            self._times.add(chosen.free_s - arrival_s, own_s, arrival_s)
        until_s = outcome.gone_s + 3 * self._rule.delay_s + 600.0
        while tick_s < until_s and not outcome.smallest_s:
            self._tick(tick_s)
            if self.wanted == 1 and tick_s >= outcome.gone_s:
                outcome.smallest_s = tick_s
            tick_s += self._rule.interval_s
        alive = [*self._running, *(each for _, _, each in self._starting)]
        outcome.replica_s += sum(tick_s - each.born_s for each in alive)
        return outcome

    def _tick(self, now_s: float) -> None:
        self._now_s = now_s
        self._take_in(now_s)
        for each in self._running:
            for moments in (each.starts_s, each.ends_s):
                while moments and moments[0] <= now_s:
                    moments.popleft()
        wanted = max(1, min(self._rule.target(self, now_s), self.most))
        if wanted != self.wanted:
            self._size(wanted)

    def _size(self, wanted: int, start_s: float = START_S) -> None:
        now_s = self._now_s
        self.outcome.sizes.append((now_s, wanted))
        self.wanted = wanted
        missing = wanted - len(self._running) - len(self._starting)
        for _ in range(missing):
            self._born += 1
            fresh = _Replica(f"{self._born}", now_s, now_s + start_s)
            heapq.heappush(self._starting, (fresh.free_s, self._born, fresh))
        for _ in range(-missing):
            # Serve's order: who does not run yet, then the newest.
            if self._starting:
                self._starting.sort()
                leaving = self._starting.pop()[2]
                self.outcome.replica_s += now_s - leaving.born_s
            else:
                leaving = self._running.pop()
                self.outcome.replica_s += max(leaving.free_s, now_s) - leaving.born_s

    def _take_in(self, now_s: float) -> None:
        while self._starting and self._starting[0][0] <= now_s:
            self._running.append(heapq.heappop(self._starting)[2])
