"""One line by tenant for a bounded number of places, in turns by cost.

Laws: places are conserved; a tenant within its share waits for nobody who borrows; with n tenants in line each gets a
quantum of cost in n, whatever the length and the order of its line. One asyncio loop uses it.
"""

from __future__ import annotations

import asyncio
import time
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from serve_app.fairness.shares import Budget, Turns

QUANTUM = 512
"""Cost a turn: the prompt tokens that a replica gives a tenant in its turn."""

_WEIGHT = 0.2
"""Of the newest start in a tenant's pace."""


@dataclass(slots=True, eq=False)
class Place:
    """What one request holds: ``units`` of the line's budget, given back one by one or all at once."""

    _line: WaitingLine
    tenant: str
    units: int

    def give_back(self, units: int | None = None) -> None:
        """Give units back, None: all that are left; harmless when none are."""
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


class WaitingLine:
    """Lines of requests for the units of one budget."""

    def __init__(self, budget: Budget, quantum: int = QUANTUM, clock: Callable[[], float] = time.monotonic) -> None:
        self._budget = budget
        self._turns = Turns(lambda _: quantum)
        self._clock = clock
        self._lines: dict[str, deque[_Waiter]] = {}
        self._pace_s: dict[str, float] = {}
        """By tenant, how long the first in line waited lately. Time without a line is nobody's wait."""
        self._first_since_s: dict[str, float] = {}

    def waiting(self) -> Counter[str]:
        """Return the requests in line by tenant."""
        return Counter({tenant: len(line) for tenant, line in self._lines.items()})

    def retry_after_s(self, tenant: str) -> float:
        """Return how long a tenant's line takes at the pace at which it went forward lately, 1 to 60 s."""
        pace_s, line = self._pace_s.get(tenant, 0.0), self._lines.get(tenant, ())
        if line:
            pace_s = max(pace_s, self._clock() - self._first_since_s[tenant])
        return min(60.0, max(1.0, pace_s * (1 + len(line))))

    async def enter(self, tenant: str, units: int = 1, cost: int = 1, order: int = 0) -> Place:
        """Wait for ``units``, or for the tenant's whole share where that is less; a cancelled wait gives back.

        Of a tenant's line those of the lowest ``order`` go first, and of these who came first.
        """
        shares = self._budget.shares
        shares.touch(tenant)
        waiter = _Waiter(units, cost, asyncio.get_running_loop().create_future(), order)
        if self._lines or self._budget.verdict(tenant, self._units(tenant, waiter)) != "granted":
            if tenant not in self._lines:
                self._lines[tenant] = deque()
                self._turns.join(tenant)
                self._first_since_s[tenant] = self._clock()
            insort(self._lines[tenant], waiter, key=attrgetter("order"))
            self._grant()
        else:
            self._start(tenant, waiter)
        try:
            return await waiter.granted
        except asyncio.CancelledError:
            self._leave(tenant, waiter)
            raise

    def _units(self, tenant: str, waiter: _Waiter) -> int:
        return min(waiter.units, self._budget.share(tenant))

    def _start(self, tenant: str, waiter: _Waiter) -> None:
        if waiter.granted.cancelled():  # whoever waited has left, and was not heard yet
            return
        units = self._units(tenant, waiter)
        self._budget.take(tenant, units)
        waiter.granted.set_result(Place(self, tenant, units))

    def _leave(self, tenant: str, waiter: _Waiter) -> None:
        granted = waiter.granted
        if granted.done() and not granted.cancelled():
            granted.result().give_back()
        elif waiter in (line := self._lines.get(tenant, deque[_Waiter]())):
            line.remove(waiter)
            self._drop_if_empty(tenant)
            self._grant()

    def _drop_if_empty(self, tenant: str) -> None:
        if not self._lines[tenant]:
            del self._lines[tenant], self._first_since_s[tenant]
            self._turns.leave(tenant)

    def _grant(self) -> None:
        """Start whoever can, in turns."""
        while able := self._able():
            tenant = self._turns.next(able)
            waiter = self._lines[tenant].popleft()
            now_s = self._clock()
            waited_s = now_s - self._first_since_s[tenant]
            before = self._pace_s.get(tenant, waited_s)
            self._pace_s[tenant] = before + _WEIGHT * (waited_s - before)
            self._first_since_s[tenant] = now_s
            self._start(tenant, waiter)
            self._turns.charge(tenant, waiter.cost)
            self._drop_if_empty(tenant)

    def _able(self) -> list[str]:
        """Return the tenants whose first request fits, in the order of their turns.

        While somebody within their share finds no room nobody borrows: else small requests of those who have more
        than their share would keep a large one of somebody who has less waiting for ever.
        """
        budget = self._budget
        able: list[str] = []
        borrowers: set[str] = set()
        owed = False
        for tenant in self._turns.credit:
            units = self._units(tenant, self._lines[tenant][0])
            verdict = budget.verdict(tenant, units)
            within = budget.within(tenant, units)
            owed = owed or (within and verdict == "no_room")
            if verdict == "granted":
                able.append(tenant)
                if not within:
                    borrowers.add(tenant)
        return [tenant for tenant in able if tenant not in borrowers] if owed else able
