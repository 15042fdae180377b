"""Tenants' shares of a room with a bound: the pool's blocks, a tier's bytes.

Owns which tenants are active, how much each holds, and which is most over its share. Subclasses count what is held, and
queue what can go. Not thread-safe, except ``holdings``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from serve_app.cache.eviction import EvictionQueue

K = TypeVar("K")


@dataclass(slots=True, eq=False)
class Account(Generic[K]):
    """What one tenant holds: ``held`` in all, ``idle`` of it (in the pool) by the cache alone.

    ``queue``: what it can give. ``used_s``: when a request of the tenant came last.
    """

    tenant: str
    weight: float
    queue: EvictionQueue[K] = field(default_factory=EvictionQueue)
    held: int = 0
    idle: int = 0
    used_s: float = -math.inf

    def excess(self, since_s: float) -> float:
        """Return how far over its share it is, by what it holds by weight; without requests ``since_s`` it has none."""
        return self.held / self.weight if self.used_s >= since_s else math.inf


class Accounts(Generic[K]):
    """Accounts by tenant. ``weights``: by tenant, 1.0 where none is given. Calls are O(tenants with an account).

    ``active_s``: seconds without a request after which a tenant has no share, and gives first, until the next.
    """

    def __init__(self, weights: Mapping[str, float], clock: Callable[[], float], active_s: float) -> None:
        self._weights = _checked(weights)
        self._clock = clock
        self._active_s = active_s
        self._accounts: dict[str, Account[K]] = {}

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Go by other weights from now on."""
        self._weights = _checked(weights)
        for tenant, account in self._accounts.items():
            account.weight = self._weights.get(tenant, 1.0)

    def holdings(self) -> dict[str, int]:
        """Return what each tenant holds (any thread)."""
        return {tenant: account.held for tenant, account in self._accounts.copy().items() if account.held}

    def seen_since(self, since_s: float) -> list[str]:
        """Return the tenants seen since a time of the clock."""
        return [tenant for tenant, account in self._accounts.items() if account.used_s >= since_s]

    def touch(self, tenant: str, ago_s: float = 0.0) -> Account[K]:
        """Note a request of a tenant, which came ``ago_s`` before now: it is active from then on."""
        account = self._account(tenant)
        account.used_s = self._clock() - ago_s
        return account

    def _account(self, tenant: str) -> Account[K]:
        account = self._accounts.get(tenant)
        if account is None:
            kept = {account.tenant for account in self._active()}
            self._accounts = {name: other for name, other in self._accounts.items() if other.held or name in kept}
            account = self._accounts[tenant] = Account(tenant, self._weights.get(tenant, 1.0))
        return account

    def _active_since_s(self) -> float:
        return self._clock() - self._active_s

    def _active(self) -> list[Account[K]]:
        """Return the accounts that have a share now."""
        since_s = self._active_since_s()
        return [account for account in self._accounts.values() if account.used_s >= since_s]

    def _furthest(self) -> Account[K] | None:
        """Return the account most over its share, of those that have something to give."""
        since_s, furthest, most = self._active_since_s(), None, -math.inf
        for account in self._accounts.values():
            excess = account.excess(since_s)
            if excess > most and account.queue:
                furthest, most = account, excess
        return furthest


def _checked(weights: Mapping[str, float]) -> dict[str, float]:
    if any(not 0.0 < weight < math.inf for weight in weights.values()):
        raise ValueError("a tenant's share must be a finite number over 0")
    return dict(weights)
