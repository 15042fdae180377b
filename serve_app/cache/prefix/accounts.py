"""Tenants' shares of a room with a bound: the pool's blocks, a tier's bytes.

Owns who is active, what each tenant holds, and who is most over their share. Does not know what is held: who counts it
and puts what can go into an account's queue is a subclass. Not thread-safe, except ``holdings``.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from serve_app.cache.eviction import EvictionQueue

K = TypeVar("K")


@dataclass(slots=True, eq=False)
class Account(Generic[K]):
    """What one tenant holds: ``held`` in all, ``idle`` of it (in the pool) by the cache alone.

    ``queue``: what it can give.
    """

    tenant: str
    weight: float
    queue: EvictionQueue[K] = field(default_factory=EvictionQueue)
    held: int = 0
    idle: int = 0
    active: bool = False
    used_s: float = 0.0
    queued: float | None = None

    @property
    def excess(self) -> float:
        """How far over its share: what it holds by weight, which orders tenants as excess over any common share."""
        return self.held / self.weight if self.active else math.inf


class Accounts(Generic[K]):
    """Accounts by tenant. ``weights``: by tenant, 1.0 where none is given. Every call is O(log n) or better.

    ``active_s``: seconds without a request after which a tenant has no share, and gives first, until the next.
    """

    def __init__(self, weights: Mapping[str, float], clock: Callable[[], float], active_s: float) -> None:
        self._weights = _checked(weights)
        self._clock = clock
        self._active_s = active_s
        self._accounts: dict[str, Account[K]] = {}
        self._recent: OrderedDict[str, Account[K]] = OrderedDict()
        self._active_weight = 0.0
        self._line: list[tuple[float, int, Account[K]]] = []
        self._ticks = 0

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Go by other weights from now on. O(tenants)."""
        self._weights = _checked(weights)
        for tenant, account in self._accounts.items():
            account.weight = self._weights.get(tenant, 1.0)
            self._queue(account)
        self._active_weight = sum(account.weight for account in self._recent.values())

    def holdings(self) -> dict[str, int]:
        """Return what each tenant holds (any thread)."""
        return {tenant: account.held for tenant, account in self._accounts.copy().items() if account.held}

    def seen_since(self, since_s: float) -> list[str]:
        """Return the tenants seen since a time of the clock, the last one first. O(such tenants)."""
        found: list[str] = []
        for tenant, account in reversed(self._recent.items()):
            if account.used_s < since_s:
                break
            found.append(tenant)
        return found

    def touch(self, tenant: str, ago_s: float = 0.0) -> Account[K]:
        """Note a request of a tenant: it is active from now on. ``ago_s``: it came before now, and after all noted."""
        now_s = self._clock()
        account = self._account(tenant)
        account.used_s = now_s - ago_s
        if not account.active:
            account.active = True
            self._active_weight += account.weight
            self._recent[tenant] = account
        else:
            self._recent.move_to_end(tenant)
        self._retire(now_s)
        return account

    def _account(self, tenant: str) -> Account[K]:
        account = self._accounts.get(tenant)
        if account is None:
            account = Account(tenant, self._weights.get(tenant, 1.0))
            self._accounts[tenant] = account
        return account

    def _queue(self, account: Account[K]) -> None:
        """See that the account stands in the line at least as far ahead as its excess asks for."""
        excess = account.excess
        if not account.queue or (account.queued is not None and account.queued >= excess):
            return
        account.queued = excess
        self._ticks += 1
        heapq.heappush(self._line, (-excess, self._ticks, account))
        if len(self._line) > 2 * len(self._accounts) + 64:
            self._line = [entry for entry in self._line if entry[2].queued == -entry[0]]
            heapq.heapify(self._line)

    def _furthest(self) -> Account[K]:
        """Take whoever is most over their share out of the line. Raises IndexError when nobody stands there."""
        while True:
            key, _, account = heapq.heappop(self._line)
            if account.queued != -key:
                continue
            account.queued = None
            if account.excess >= -key:
                return account
            self._queue(account)

    def _retire(self, now_s: float) -> None:
        """Take their shares from tenants that have not been seen for long."""
        while self._recent:
            tenant, account = next(iter(self._recent.items()))
            if now_s - account.used_s <= self._active_s:
                return
            del self._recent[tenant]
            account.active = False
            self._active_weight = self._active_weight - account.weight if self._recent else 0.0
            if not account.held:
                del self._accounts[tenant]
            else:
                self._queue(account)


def _checked(weights: Mapping[str, float]) -> dict[str, float]:
    if any(not 0.0 < weight < math.inf for weight in weights.values()):
        raise ValueError("a tenant's share must be a finite number over 0")
    return dict(weights)
