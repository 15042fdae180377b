"""The queue of all places where tenants' work waits: turns among tenants by cost, and an order within each.

Deficit round robin, fair for work items of any cost. The ingress' places, threads, and the steps of both engines use
it. Not thread-safe.
"""

import time
from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from typing import Generic, TypeVar

from serve_app.fairness.shares import ACTIVE_S

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
