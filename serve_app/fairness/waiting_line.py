"""One queue per tenant for a bounded number of places, with turns by cost.

Invariants: places are conserved; a tenant within its share never waits for borrowing tenants; with n waiting tenants,
each gets every n-th quantum of cost, regardless of the length and order of its queue. One asyncio loop uses it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from router.protocol.samples import WAIT_BUCKETS_S, Histogram
from serve_app.errors import LimitReason
from serve_app.fairness.shares import Budget, verdict
from serve_app.fairness.tenant_queue import TenantQueue

QUANTUM = 512
"""The cost of a turn: the prompt tokens of a tenant's turn in a replica."""

_WEIGHT = 0.2
"""The weight of the newest start in a tenant's pace."""


@dataclass(slots=True, eq=False)
class Place:
    """The ``units`` of the queue's budget that one request holds, returned one by one or all at once."""

    _line: WaitingLine
    tenant: str
    units: int

    def give_back(self, units: int | None = None) -> None:
        """Return units; None: all that are left. Without any left, this has no effect."""
        units = self.units if units is None else min(units, self.units)
        if units:
            self.units -= units
            self._line._budget.give_back(self.tenant, units)
            self._line._grant()


@dataclass(slots=True, eq=False)
class _Waiter:
    units: int
    cost: int
    granted: asyncio.Future[Place]
    order: int
    arrival_s: float


class WaitingLine:
    """Queues of requests for the units of one budget."""

    def __init__(self, budget: Budget, quantum: int = QUANTUM, clock: Callable[[], float] = time.monotonic) -> None:
        self._budget = budget
        self._queue: TenantQueue[_Waiter] = TenantQueue(lambda _: quantum, clock, attrgetter("order"))
        self._clock = clock
        self.waits = Histogram(WAIT_BUCKETS_S)
        """The seconds that requests waited, if they had to."""
        self._pace_s: dict[str, float] = {}
        """By tenant, the recent average wait at the head of its queue. Time with an empty queue does not count."""
        self._first_since_s: dict[str, float] = {}

    def waiting(self) -> Counter[str]:
        """Return the number of queued requests by tenant."""
        return Counter({tenant: len(line) for tenant, line in self._queue.lines.items()})

    def running(self, tenant: str | None) -> int:
        """Return the units that a tenant holds, None: all that are held."""
        return self._budget.held(tenant)

    def reason(self, tenant: str) -> LimitReason | None:
        """Return why a tenant's request for one unit would wait now, None: it would start at once."""
        free = not self._queue.lines and self._budget.verdict(tenant, 1) == "granted"
        return None if free else self._budget.reason(tenant)

    def retry_after_s(self, tenant: str) -> float:
        """Return the time for a tenant's queue at its recent pace, 1 to 60 s."""
        pace_s, line = self._pace_s.get(tenant, 0.0), self._queue.lines.get(tenant, ())
        if line:
            pace_s = max(pace_s, self._clock() - self._first_since_s[tenant])
        return min(60.0, max(1.0, pace_s * (1 + len(line))))

    async def enter(self, tenant: str, units: int = 1, cost: int = 1, order: int = 0) -> Place:
        """Wait for ``units``, or for the tenant's whole share if that is less. A cancelled wait returns its units.

        A tenant's queue is sorted by ``order``, lowest first, then by arrival.
        """
        shares = self._budget.shares
        shares.touch(tenant)
        waiter = _Waiter(units, cost, asyncio.get_running_loop().create_future(), order, self._clock())
        if self._queue.lines or self._budget.verdict(tenant, self._units(tenant, waiter)) != "granted":
            if tenant not in self._queue.lines:
                self._first_since_s[tenant] = self._clock()
            self._queue.put(tenant, waiter)
            self._grant()
        else:
            self._start(tenant, waiter)
        try:
            return await waiter.granted
        except asyncio.CancelledError:
            self._leave(tenant, waiter)
            raise

    def _units(self, tenant: str, waiter: _Waiter) -> int:
        return 1 if waiter.units == 1 else min(waiter.units, self._budget.share(tenant))

    def _start(self, tenant: str, waiter: _Waiter) -> None:
        if waiter.granted.cancelled():  # the waiting caller was cancelled and has not run yet
            return
        units = self._units(tenant, waiter)
        self._budget.take(tenant, units)
        waiter.granted.set_result(Place(self, tenant, units))

    def _leave(self, tenant: str, waiter: _Waiter) -> None:
        granted = waiter.granted
        if granted.done() and not granted.cancelled():
            granted.result().give_back()
        elif self._queue.discard(tenant, waiter):
            self._grant()

    def _grant(self) -> None:
        """Start all requests that fit, in turns."""
        while able := self._able():
            tenant = self._queue.next(able)
            waiter = self._queue.take(tenant, self._queue.lines[tenant][0].cost)
            now_s = self._clock()
            waited_s = now_s - self._first_since_s[tenant]
            before = self._pace_s.get(tenant, waited_s)
            self._pace_s[tenant] = before + _WEIGHT * (waited_s - before)
            self._first_since_s[tenant] = now_s
            self.waits.observe(now_s - waiter.arrival_s)
            self._start(tenant, waiter)

    def _able(self) -> list[str]:
        """Return the tenants with a first request that fits, in the order of their turns.

        While a tenant within its share lacks capacity, no tenant borrows. Otherwise small requests of tenants over
        their share could block a large request of a tenant under its share forever.
        """
        budget = self._budget
        able: list[str] = []
        borrowers: set[str] = set()
        owed = False
        for tenant in self._queue.credit:
            claim = budget.claim(tenant, self._units(tenant, self._queue.lines[tenant][0]))
            answer = verdict(claim)
            owed = owed or answer == "no_room"
            if answer == "granted":
                able.append(tenant)
                if not claim.within:
                    borrowers.add(tenant)
        return [tenant for tenant in able if tenant not in borrowers] if owed else able
