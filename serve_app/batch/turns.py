"""Which queued batches may have a place in an ingress now: tenants take turns, and what cannot go on yet rests."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf

from serve_app.batch.batches import QueuedBatch

TURN_S = 60.0
"""After this time a batch makes room for another tenant's that waits for a place."""
LEAST_REST_S, MOST_REST_S = 2.0, 900.0
"""Of a batch that failed, doubled each time; the most also of a tenant, whose limits may be raised meanwhile."""


@dataclass(slots=True)
class Turns:
    """The order of an ingress' queue. ``clock``: in seconds, and never set back."""

    clock: Callable[[], float] = time.monotonic
    _numbers: Iterator[int] = field(default_factory=count)
    _waits: dict[str, int] = field(default_factory=dict)
    """By tenant in the queue, the number that it drew when it came or its last turn ended."""
    _rests: dict[str, float] = field(default_factory=dict)
    """By tenant or batch, until when."""
    _failures: Counter[str] = field(default_factory=Counter)

    def order(self, queue: Sequence[QueuedBatch]) -> list[QueuedBatch]:
        """Return the queue by turns: first of the tenants that have waited longest, then the oldest of each."""
        tenants, batches = {one.tenant for one in queue}, {one.batch_id for one in queue}
        now_s, names = self.clock(), tenants | batches
        self._waits = {name: number for name, number in self._waits.items() if name in tenants}
        oldest_first = sorted(queue, key=lambda one: one.created_at)
        for one in oldest_first:
            if one.tenant not in self._waits:
                self._waits[one.tenant] = next(self._numbers)
        self._rests = {name: until_s for name, until_s in self._rests.items() if name in names and until_s > now_s}
        self._failures = Counter({name: times for name, times in self._failures.items() if name in batches})
        return sorted(oldest_first, key=lambda one: self._waits[one.tenant])

    def rests(self, *names: str) -> bool:
        """Return whether one of these tenants or batches rests."""
        now_s = self.clock()
        return any(self._rests.get(name, -inf) > now_s for name in names)

    def ended(self, tenant: str) -> None:
        """Let a tenant wait behind all others: its turn has ended."""
        self._waits[tenant] = next(self._numbers)

    def is_over(self, begun_s: float) -> bool:
        """Return whether a turn has lasted for its time."""
        return self.clock() - begun_s >= TURN_S

    def rest(self, name: str, seconds: float) -> None:
        """Let a tenant or a batch rest, at least for so long if it is not too long."""
        until_s = self.clock() + min(seconds, MOST_REST_S)
        self._rests[name] = max(until_s, self._rests.get(name, -inf))

    def failed(self, batch_id: str) -> None:
        """Let a batch that failed rest, the longer the more often it did."""
        self.rest(batch_id, LEAST_REST_S * 2.0 ** min(self._failures[batch_id], 16))
        self._failures[batch_id] += 1

    def worked(self, batch_id: str) -> None:
        """Forget a batch's failures."""
        del self._failures[batch_id]

    def refresh(self) -> None:
        """End all rests: limits have changed."""
        self._rests.clear()
