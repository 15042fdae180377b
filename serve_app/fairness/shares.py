"""What part of a thing is a tenant's, whether it may take more, and whose turn it is: the rules of replica and ingress.

Within its share a tenant takes what is free; beyond it, it must leave an eighth to the others. Not thread-safe.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Literal

ACTIVE_S = 60.0
"""Seconds without a request after which a tenant has no share until its next."""

UNBORROWED_PART = 8
"""One part in this many (an eighth) is never borrowed."""

Verdict = Literal["granted", "no_room", "over_share"]


class Shares:
    """Parts of a whole by weight, among the tenants seen lately.

    ``weights``: of every tenant that there can be. Where there are several, one that is alone counts as one of two:
    a share has to be ready for whoever comes next.
    """

    def __init__(self, weights: Mapping[str, float], clock: Callable[[], float] = time.monotonic) -> None:
        self._weights = dict(weights)
        self._clock = clock
        self._seen_s: OrderedDict[str, float] = OrderedDict()
        self._active_weight = 0.0

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Go by other weights from now on."""
        self._weights = dict(weights)
        self._active_weight = sum(map(self._weight, self._seen_s))

    @property
    def several(self) -> bool:
        """Whether there can be more than one tenant."""
        return len(self._weights) > 1

    @property
    def contested(self) -> bool:
        """Whether more than one tenant was seen lately."""
        return len(self._seen_s) > 1

    def touch(self, tenant: str) -> None:
        """Note a request of a tenant."""
        now_s = self._clock()
        if tenant not in self._seen_s:
            self._active_weight += self._weight(tenant)
        self._seen_s[tenant] = now_s
        self._seen_s.move_to_end(tenant)
        while now_s - next(iter(self._seen_s.values())) > ACTIVE_S:
            idle, _ = self._seen_s.popitem(last=False)
            self._active_weight -= self._weight(idle)

    def fraction(self, tenant: str) -> float:
        """Return the part that is ``tenant``'s among those seen in the last ``ACTIVE_S``, over 0 and at most 1."""
        weight = self._weight(tenant)
        others = self._active_weight - (weight if tenant in self._seen_s else 0.0)
        if self.several and len(self._seen_s) <= 1:
            others = max(others, 1.0)
        return weight / (weight + max(others, 0.0))

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)


class Budget:
    """A bounded amount of something, held by tenants. ``total`` is asked at every verdict."""

    def __init__(self, shares: Shares, total: Callable[[], int]) -> None:
        self.shares = shares
        self.used = 0
        self._total = total
        self._held: Counter[str] = Counter()

    def share(self, tenant: str) -> int:
        """Return a tenant's share, at least 1."""
        return max(1, int(self._total() * self.shares.fraction(tenant)))

    def within(self, tenant: str, amount: int) -> bool:
        """Whether a tenant would not borrow: it has nothing yet, or enough of its share is left."""
        held = self._held[tenant]
        return not held or held + amount <= self.share(tenant)

    def verdict(self, tenant: str, amount: int) -> Verdict:
        """Say whether a tenant may take ``amount`` now; what is larger than the whole fits where nothing is taken."""
        total = self._total()
        free = total - self.used
        if self.within(tenant, amount):
            return "granted" if amount <= free or not self.used else "no_room"
        left = max(1, total // UNBORROWED_PART) if self.shares.several else 0
        return "granted" if free - amount >= left else "over_share"

    def take(self, tenant: str, amount: int) -> None:
        """Give ``amount`` to a tenant."""
        self._held[tenant] += amount
        self.used += amount

    def give_back(self, tenant: str, amount: int) -> None:
        """Take ``amount`` back from a tenant."""
        self.used -= amount
        self._held[tenant] -= amount
        if not self._held[tenant]:
            del self._held[tenant]


class Turns:
    """Deficit round robin: whose turn it is among tenants that have work, whatever the cost of each piece of it.

    With n tenants at work one waits for at most a turn of each other, and what it took beyond its turn. ``credit``: the
    ring of tenants with work; ``turn``: the credit of a tenant's next turn.
    """

    def __init__(self, turn: Callable[[str], int]) -> None:
        self.credit: OrderedDict[str, int] = OrderedDict()
        self._turn = turn

    def join(self, tenant: str) -> None:
        """Put a tenant that has work at the ring's end, unless it is in it."""
        self.credit.setdefault(tenant, 0)

    def leave(self, tenant: str) -> None:
        """Take out a tenant without work: it has neither credit nor debt."""
        del self.credit[tenant]

    def next(self, able: Collection[str]) -> str:
        """Return the next tenant of some in the ring's order; a turn gives credit, and debtors are passed over."""
        credit = self.credit
        # The rounds in which nobody comes out of debt, at once.
        rounds = min(-credit[tenant] // self._turn(tenant) for tenant in able)
        if rounds > 0:
            for tenant in able:
                credit[tenant] += rounds * self._turn(tenant)
        for tenant in tuple(able):
            if credit[tenant] <= 0:
                credit[tenant] += self._turn(tenant)
            if credit[tenant] > 0:
                break
            credit.move_to_end(tenant)
        return tenant

    def charge(self, tenant: str, cost: int) -> None:
        """Take the cost of what was begun from a tenant's credit; without any left its turn is over."""
        self.credit[tenant] -= cost
        if self.credit[tenant] <= 0:
            self.credit.move_to_end(tenant)
