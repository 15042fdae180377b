"""The rules for tenants' shares, borrowing and turns, used in replicas and ingresses.

Within its share a tenant takes free capacity. Beyond its share it must leave an eighth to the others. Not thread-safe.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Literal

ACTIVE_S = 60.0
"""After this many seconds without a request, a tenant has no share until its next request."""

UNBORROWED_PART = 8
"""One part in this many (an eighth) is never borrowed."""

Verdict = Literal["granted", "no_room", "over_share"]


class Shares:
    """Parts of a whole by weight, among the recently active tenants.

    ``weights``: of every possible tenant. If there are several, a lone active tenant counts as one of two, so that a
    share is ready for the next tenant.
    """

    def __init__(self, weights: Mapping[str, float], clock: Callable[[], float] = time.monotonic) -> None:
        self._weights = dict(weights)
        self._clock = clock
        self._seen_s: OrderedDict[str, float] = OrderedDict()
        self._active_weight = 0.0

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Use new weights from now on."""
        self._weights = dict(weights)
        self._active_weight = sum(map(self._weight, self._seen_s))

    @property
    def several(self) -> bool:
        """Whether more than one tenant is configured."""
        return len(self._weights) > 1

    @property
    def contested(self) -> bool:
        """Whether more than one tenant was active recently."""
        return len(self._seen_s) > 1

    def touch(self, tenant: str) -> None:
        """Record a request of a tenant."""
        now_s = self._clock()
        if tenant not in self._seen_s:
            self._active_weight += self._weight(tenant)
        self._seen_s[tenant] = now_s
        self._seen_s.move_to_end(tenant)
        while now_s - next(iter(self._seen_s.values())) > ACTIVE_S:
            idle, _ = self._seen_s.popitem(last=False)
            self._active_weight -= self._weight(idle)

    def fraction(self, tenant: str) -> float:
        """Return the share of ``tenant`` among tenants active in the last ``ACTIVE_S``, above 0 and at most 1."""
        weight = self._weight(tenant)
        others = self._active_weight - (weight if tenant in self._seen_s else 0.0)
        if self.several and len(self._seen_s) <= 1:
            others = max(others, 1.0)
        return weight / (weight + max(others, 0.0))

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)


class Budget:
    """A bounded amount of a resource, held by tenants. ``total`` is called at every verdict."""

    def __init__(self, shares: Shares, total: Callable[[], int]) -> None:
        self.shares = shares
        self.used = 0
        self._total = total
        self._held: Counter[str] = Counter()

    def share(self, tenant: str) -> int:
        """Return a tenant's share, at least 1."""
        return max(1, int(self._total() * self.shares.fraction(tenant)))

    def held(self, tenant: str | None) -> int:
        """Return what a tenant holds, None: what all hold."""
        return self.used if tenant is None else self._held[tenant]

    def within(self, tenant: str, amount: int) -> bool:
        """Return whether a tenant would stay within its share. A tenant that holds nothing always does."""
        held = self._held[tenant]
        return not held or held + amount <= self.share(tenant)

    def verdict(self, tenant: str, amount: int) -> Verdict:
        """Return whether a tenant may take ``amount`` now. An amount above the total fits if nothing is in use."""
        total = self._total()
        free = total - self.used
        if self.within(tenant, amount):
            return "granted" if amount <= free or not self.used else "no_room"
        left = max(1, total // UNBORROWED_PART) if self.shares.several else 0
        return "granted" if free - amount >= left else "over_share"

    def take(self, tenant: str, amount: int) -> None:
        """Assign ``amount`` to a tenant."""
        self._held[tenant] += amount
        self.used += amount

    def give_back(self, tenant: str, amount: int) -> None:
        """Return ``amount`` from a tenant."""
        self.used -= amount
        self._held[tenant] -= amount
        if not self._held[tenant]:
            del self._held[tenant]


class Turns:
    """Deficit round robin: the order of turns among tenants with work, fair for work items of any cost.

    With n tenants, one waits for at most a turn of each other tenant, plus the excess of its own last turn. ``credit``:
    the ring of tenants with work; ``turn``: the credit of a tenant's next turn.
    """

    def __init__(self, turn: Callable[[str], int], clock: Callable[[], float] = time.monotonic) -> None:
        self.credit: OrderedDict[str, int] = OrderedDict()
        self._turn = turn
        self._clock = clock
        self._rounds = 0.0
        self._served = ""
        self._debts: OrderedDict[str, tuple[int, float, float]] = OrderedDict()
        """By tenant without work: its credit below 0, and the rounds and the time when it left."""

    def join(self, tenant: str) -> None:
        """Add a tenant with work to the ring's end, unless it is already in the ring."""
        if tenant in self.credit:
            return
        self._forget_old_debts()
        credit, rounds, _ = self._debts.pop(tenant, (0, self._rounds, 0.0))
        paid = int(max(0.0, self._rounds - rounds) * self._turn(tenant))
        self.credit[tenant] = min(0, credit + paid)

    def leave(self, tenant: str) -> None:
        """Remove a tenant without work. Its credit is lost.

        Its debt stays for ``ACTIVE_S``, or a tenant with one request at a time would never pay. The rounds of the
        others reduce it as if it waited.
        """
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

    def _forget_old_debts(self) -> None:
        while self._debts and self._clock() - next(iter(self._debts.values()))[2] > ACTIVE_S:
            self._debts.popitem(last=False)
