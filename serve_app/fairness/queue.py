"""The queue of all places where tenants' work waits: turns among tenants by cost, and an order within each.

Deficit round robin, fair for work items of any cost. The ingress' places, threads, and the steps of both engines use
it. Not thread-safe.
"""

from __future__ import annotations

import asyncio
import os
import time
from bisect import insort
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, ParamSpec, TypeVar

from router.protocol.samples import WAIT_BUCKETS_S, Histogram, Mean
from serve_app.errors import LimitReason
from serve_app.fairness.shares import ACTIVE_S, Budget, Shares, verdict
from serve_app.fairness.work import ThreadJob, set_job

YIELDING_ORDER = 2**31
"""Work of this order and above (`flex`) also waits for the other tenants' work of a lower one."""

W = TypeVar("W")
"""One tenant's work: a waiting request or a sequence."""


class TenantQueue(Generic[W]):
    """Lines of work by tenant. ``turn``: the credit of a tenant's next turn; ``order``: of work in its tenant's line.

    ``credit``: the ring of tenants with work. With n tenants, one waits for at most a turn of each other tenant, plus
    the excess of its own last turn. In a line the lowest order is first, then what came first.
    """

    def __init__(
        self,
        turn: Callable[[str], int],
        clock: Callable[[], float] = time.monotonic,
        order: Callable[[W], int] = lambda _: 0,
    ) -> None:
        self.lines: dict[str, deque[W]] = {}
        self._order = order
        self.credit: OrderedDict[str, int] = OrderedDict()
        self._turn = turn
        self._clock = clock
        self._rounds = 0.0
        self._served = ""
        self._debts: OrderedDict[str, tuple[int, float, float]] = OrderedDict()
        """By tenant without work: its credit below 0, and the rounds and the time when it left."""

    def put(self, tenant: str, work: W) -> None:
        """Add work to its tenant's line."""
        self.join(tenant)
        insort(self.lines.setdefault(tenant, deque()), work, key=self._order)

    def take(self, tenant: str, cost: int) -> W:
        """Start the first work of a tenant whose turn it is (``next``); ``cost`` is charged."""
        work = self.lines[tenant].popleft()
        self.charge(tenant, cost)
        self._drop_if_empty(tenant)
        return work

    def discard(self, tenant: str, work: W) -> bool:
        """Drop work that waits no longer; return False if it did not wait."""
        line = self.lines.get(tenant, deque[W]())
        if work not in line:
            return False
        line.remove(work)
        self._drop_if_empty(tenant)
        return True

    def hand_out(
        self, budget: int, serve: Callable[[str, deque[W], int], int], most: dict[str, int] | None = None
    ) -> None:
        """Hand out a step's ``budget`` in turns. ``most``: for some tenants; it is reduced.

        ``serve`` works on a tenant's line up to an amount, and returns what it used. It removes work that is done, or
        that cannot go on.
        """
        most = most or {}
        while budget > 0 and self.credit:
            tenant = self.next(self.credit)
            line = self.lines[tenant]
            spent = serve(tenant, line, min(budget, self.credit[tenant], most.get(tenant, budget)))
            budget -= spent
            self.charge(tenant, spent)
            if tenant in most:
                most[tenant] -= spent
            if not line or most.get(tenant) == 0:
                self.leave(tenant)

    def owe(self, tenant: str, cost: int) -> None:
        """Charge a tenant for work that cost more than was known at its start, whether or not it has more."""
        waits = tenant in self.credit
        self.join(tenant)
        self.charge(tenant, cost)
        if not waits:
            self.leave(tenant)

    def join(self, tenant: str) -> None:
        """Add a tenant with work to the ring's end, unless it is already in the ring."""
        if tenant in self.credit:
            return
        self._forget_old_debts()
        credit, rounds, _ = self._debts.pop(tenant, (0, self._rounds, 0.0))
        paid = int(max(0.0, self._rounds - rounds) * self._turn(tenant))
        self.credit[tenant] = min(0, credit + paid)

    def leave(self, tenant: str) -> None:
        """Remove a tenant, with its line. Its credit is lost.

        Its debt stays for ``ACTIVE_S``, or a tenant with one request at a time would never pay. The rounds of the
        others reduce it as if it waited.
        """
        self.lines.pop(tenant, None)
        credit = self.credit.pop(tenant)
        self._forget_old_debts()
        if credit < 0:
            # It has had its turn of the round in progress.
            self._debts[tenant] = credit, self._rounds + (tenant == self._served), self._clock()

    def next(self, able: Collection[str]) -> str:
        """Return the next of the ``able`` tenants (in ring order). A turn adds credit; tenants in debt are skipped."""
        credit = self.credit
        # Apply all rounds in which every tenant stays in debt at once.
        rounds = min(-credit[tenant] // self._turn(tenant) for tenant in able)
        if rounds > 0:
            self._rounds += rounds
            for tenant in able:
                credit[tenant] += rounds * self._turn(tenant)
        for tenant in tuple(able):
            if credit[tenant] <= 0:
                self._rounds += 1 / len(able)
                credit[tenant] += self._turn(tenant)
            if credit[tenant] > 0:
                break
            credit.move_to_end(tenant)
        return tenant

    def charge(self, tenant: str, cost: int) -> None:
        """Subtract the cost of started work from a tenant's credit. Without credit its turn ends."""
        self.credit[tenant] -= cost
        self._served = tenant
        if self.credit[tenant] <= 0:
            self.credit.move_to_end(tenant)

    def _drop_if_empty(self, tenant: str) -> None:
        if not self.lines[tenant]:
            self.leave(tenant)

    def _forget_old_debts(self) -> None:
        while self._debts and self._clock() - next(iter(self._debts.values()))[2] > ACTIVE_S:
            self._debts.popitem(last=False)


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
    yields: bool

    def give_back(self, units: int | None = None) -> None:
        """Return units; None: all that are left. Without any left, this has no effect."""
        units = self.units if units is None else min(units, self.units)
        if units:
            self.units -= units
            self._line.yielding -= units * self.yields
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
        self.yielding = 0
        """The held units of work that yields (``YIELDING_ORDER``)."""
        self.waits = Histogram(WAIT_BUCKETS_S)
        """The seconds that requests waited, if they had to."""
        self._pace_s = defaultdict[str, Mean](lambda: Mean(_WEIGHT))
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
        pace_s, line = self._pace_s[tenant].value, self._queue.lines.get(tenant, ())
        if line:
            pace_s = max(pace_s, self._clock() - self._first_since_s[tenant])
        return min(60.0, max(1.0, pace_s * (1 + len(line))))

    def owe(self, tenant: str, cost: int) -> None:
        """Charge a tenant for more than it entered with."""
        self._queue.owe(tenant, cost)

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
        units, yields = self._units(tenant, waiter), waiter.order >= YIELDING_ORDER
        self._budget.take(tenant, units)
        self.yielding += units * yields
        waiter.granted.set_result(Place(self, tenant, units, yields))

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
            self._pace_s[tenant].observe(now_s - self._first_since_s[tenant])
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


class LoopTurns:
    """Turns of tenants to begin a request, one of its prompts or a call of a replica: one a round of the event loop.

    Each takes a millisecond or more there. A hundred requests that begin at once, with sixteen answers each, would be
    seconds in which everything else waits for its next round.
    """

    def __init__(self) -> None:
        self._queue: TenantQueue[asyncio.Future[None]] = TenantQueue(lambda _: 1)
        self._taken = False

    async def turn(self, tenant: str) -> None:
        """Wait until a tenant may begin: not at all if nothing else has begun in this round."""
        if not self._taken:  # so nobody waits
            self._take()
            return
        granted = asyncio.get_running_loop().create_future()
        self._queue.put(tenant, granted)
        try:
            await granted
        finally:
            self._queue.discard(tenant, granted)

    def _take(self) -> None:
        self._taken = True
        asyncio.get_running_loop().call_soon(self._next_round)

    def _next_round(self) -> None:
        self._taken = False
        while self._queue.credit and not self._taken:
            granted = self._queue.take(self._queue.next(self._queue.credit), 1)
            if not granted.done():  # else its caller has left
                granted.set_result(None)
                self._take()


P = ParamSpec("P")
T = TypeVar("T")

QUANTUM_BYTES = 16 << 10
"""Bytes of text per turn."""
_BYTES_PER_S = 1 << 20
"""Text that a thread tokenizes a second, or less: what work took longer is charged to its tenant in such bytes."""


class FairWorkers:
    """A few threads. With several tenants, no tenant can use all of them.

    ``clock``: seconds that a thread is in use; ``loop``: turns in the event loop of those who use the threads.
    """

    def __init__(self, shares: Shares, threads: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        threads = max(2, min(4, os.cpu_count() or 1)) if threads is None else threads
        self._clock = clock
        self.loop = LoopTurns()
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="prepare")
        self._line = WaitingLine(Budget(shares, lambda: threads), QUANTUM_BYTES)

    async def run(self, tenant: str, cost_bytes: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``work`` in a thread at the tenant's turn and return its result.

        A cancelled caller stops work that asks (``check_wanted``); other work goes on to its end.
        """
        place = await self._line.enter(tenant, cost=cost_bytes)
        loop = asyncio.get_running_loop()
        job, owed = ThreadJob(), 0

        def begun() -> T:
            nonlocal owed
            begun_s = self._clock()
            set_job(job)
            try:
                return work(*args, **kwargs)
            finally:
                set_job(None)
                owed = int((self._clock() - begun_s) * _BYTES_PER_S) - cost_bytes

        def ended() -> None:
            if owed > 0:
                self._line.owe(tenant, owed)
            place.give_back()

        def finished(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop is closed, so no caller needs the thread
                loop.call_soon_threadsafe(ended)

        done = self._threads.submit(begun)
        done.add_done_callback(finished)
        try:
            return await asyncio.wrap_future(done)
        finally:
            job.abandoned = True
