"""The rule for tenants' shares and borrowing, used in replicas and ingresses: one formula for all resources.

A share is a tenant's weight, divided by the weights of all that compete (``Shares.fraction``). Within its share a
tenant takes free capacity. Beyond its share it borrows, and must leave a reserve to the others (``verdict``). Not
thread-safe.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from math import fsum, inf
from typing import Literal, NamedTuple

from serve_app.errors import LimitReason, Where

ACTIVE_S = 60.0
"""After this many seconds without a request, a tenant has no share until its next request."""

UNBORROWED_PART = 8
"""One part in this many (an eighth) is never borrowed."""

Verdict = Literal["granted", "no_room", "over_share"]


class Shares:
    """Parts of a whole by weight, 1.0 by default. ``weights``: of every possible tenant, if that is known.

    ``active_s``: a tenant competes for this long after a request: a place is empty at once, but blocks of KV are worth
    something for longer, and files for a day. ``outside``: tenants that narrow nobody's share.
    """

    def __init__(
        self,
        weights: Mapping[str, float],
        clock: Callable[[], float] = time.monotonic,
        active_s: float = ACTIVE_S,
        outside: Collection[str] = (),
    ) -> None:
        self._weights = checked_weights(weights)
        self._clock = clock
        self._active_s = active_s
        self._outside = frozenset(outside)
        self._seen_s: dict[str, float] = {}
        self._next_idle_s = inf
        """No tenant was seen before this time."""
        self._sums: tuple[int, float] | None = None
        self.changes = 0
        """Changes of the fractions so far, as of the last question."""
        self.ends = 0
        """Those of them that took a tenant's share away, or gave other weights."""

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Use new weights from now on. Raises ValueError."""
        self._weights = checked_weights(weights)
        self._changed(ends=True)

    def weight(self, tenant: str) -> float:
        """Return a tenant's weight."""
        return self._weights.get(tenant, 1.0)

    @property
    def several(self) -> bool:
        """Whether more than one tenant is configured."""
        return len(self._weights) > 1

    @property
    def contested(self) -> bool:
        """Whether more than one tenant was active recently."""
        return self._active()[0] > 1

    def touch(self, tenant: str, ago_s: float = 0.0) -> None:
        """Record a tenant's request that arrived ``ago_s`` seconds ago."""
        if tenant not in self._seen_s:
            self._changed()
        seen_s = self._seen_s[tenant] = self._clock() - ago_s
        self._next_idle_s = min(self._next_idle_s, seen_s)

    def settle(self) -> None:
        """Let tenants that are no longer active lose their shares. All questions do so first."""
        since_s = self._clock() - self._active_s
        if since_s > self._next_idle_s:
            active = {tenant: seen_s for tenant, seen_s in self._seen_s.items() if seen_s >= since_s}
            if len(active) < len(self._seen_s):
                self._changed(ends=True)
            self._seen_s = active
            self._next_idle_s = min(active.values(), default=inf)

    def fraction(self, tenant: str, among: Collection[str] | None = None) -> float:
        """Return a tenant's share, above 0 and at most 1, beside all active tenants, or beside ``among``.

        Beside no other active tenant, one of several counts as one of two, so that a share is ready for the next one.
        ``among`` is for guarantees that do not depend on requests: of pins, and of the sessions that hold the pool.
        """
        weight = self.weight(tenant)
        if among is not None:
            return weight / (weight + fsum(self.weight(other) for other in among if other != tenant))
        tenants, others = self._active()
        if tenant in self._seen_s and tenant not in self._outside:
            tenants, others = tenants - 1, others - weight
        if not tenants:
            others = 1.0 if self.several else 0.0
        return weight / (weight + others)

    def _active(self) -> tuple[int, float]:
        """Return the number of active tenants, and the sum of their weights."""
        self.settle()
        if self._sums is None:
            weights = [self.weight(tenant) for tenant in self._seen_s if tenant not in self._outside]
            self._sums = len(weights), fsum(weights)
        return self._sums

    def _changed(self, *, ends: bool = False) -> None:
        self._sums = None
        self.changes += 1
        self.ends += ends


class Claim(NamedTuple):
    """A tenant asks for ``amount`` of a resource beside its ``own``. ``free``: what nobody holds.

    ``reserve``: what a tenant beyond its ``share`` must leave free. A tenant that holds nothing is within its share.
    """

    amount: int
    own: int
    share: float
    free: float
    reserve: int

    @property
    def within(self) -> bool:
        """Whether the tenant would stay within its share."""
        return not self.own or self.own + self.amount <= self.share


def verdict(*claims: Claim) -> Verdict:
    """Return whether a tenant may take all that it claims now. Who exceeds one share must leave every reserve."""
    # Loops: generators would take as long again, and every request and every look at a queue asks here.
    within = fits = leaves = True
    for amount, own, share, free, reserve in claims:
        within &= not own or own + amount <= share
        fits &= amount <= free
        leaves &= free - amount >= reserve
    if within:
        return "granted" if fits else "no_room"
    return "granted" if leaves else "over_share"


class Budget:
    """A bounded amount of a resource, held by tenants. ``total`` is called at every question.

    ``limit``: the setting that bounds it, at ``place``, for the reasons of refusals and waits.
    """

    def __init__(
        self, shares: Shares, total: Callable[[], int], limit: str = "threads", place: Where = "ingress"
    ) -> None:
        self.shares = shares
        self._limit = limit
        self._place = place
        self.used = 0
        self._total = total
        self._used_by: Counter[str] = Counter()

    def share(self, tenant: str) -> int:
        """Return a tenant's share, at least 1."""
        return max(1, int(self._total() * self.shares.fraction(tenant)))

    def held(self, tenant: str | None) -> int:
        """Return what a tenant holds, None: what all hold."""
        return self.used if tenant is None else self._used_by[tenant]

    def claim(self, tenant: str, amount: int, kept: int = 0) -> Claim:
        """Return a tenant's claim. ``kept``: more to leave for others than an eighth.

        An amount above the total fits if nothing is in use.
        """
        total, fraction = self._total(), self.shares.fraction(tenant)
        reserve = max(1, total // UNBORROWED_PART) + kept if fraction < 1.0 else 0  # nobody else can come
        free = total - self.used if self.used else inf
        return Claim(amount, self._used_by.get(tenant, 0), max(1, int(total * fraction)), free, reserve)

    def verdict(self, tenant: str, amount: int) -> Verdict:
        """Return whether a tenant may take ``amount`` now."""
        if tenant not in self._used_by:  # the same without a look at its share
            return "granted" if not self.used or amount <= self._total() - self.used else "no_room"
        return verdict(self.claim(tenant, amount))

    def reason(self, tenant: str) -> LimitReason:
        """Return why a tenant is refused or waits here: its own amount, of the whole."""
        return LimitReason(self._place, self._limit, self._used_by[tenant], self._total())

    def take(self, tenant: str, amount: int) -> None:
        """Assign ``amount`` to a tenant."""
        self._used_by[tenant] += amount
        self.used += amount

    def give_back(self, tenant: str, amount: int) -> None:
        """Return ``amount`` from a tenant."""
        self.used -= amount
        self._used_by[tenant] -= amount
        if not self._used_by[tenant]:
            del self._used_by[tenant]


def checked_weights(weights: Mapping[str, float]) -> dict[str, float]:
    """Return a copy. Raises ValueError for a weight that is not a finite number over 0."""
    if any(not 0.0 < weight < inf for weight in weights.values()):
        raise ValueError("a tenant's share must be a finite number over 0")
    return dict(weights)
