"""Tenants' shares of a bounded space: the pool's blocks, or a tier's bytes.

It owns the tenants' holdings, the tenant most over its share, and the account of each block of the pool; the shares are
``fairness.Shares``. The tenant's queue owns the eviction order: ``cache.eviction``, or vLLM's own. Invariants: the
accounts add up to the space in use; no tenant at or under its share loses a block while a tenant above has an evictable
one; unneeded space can be borrowed. Not thread-safe, except ``holdings``.
"""

import math
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import Generic, TypeVar

from serve_app.cache.eviction import EvictionQueue, Standing
from serve_app.fairness.shares import Shares

CACHE_ACTIVE_S = 600.0
"""After this many seconds without a request, a tenant has no share and its blocks are evicted first."""

PUBLIC = "(public)"
"""The account of public prompts' blocks. It has its own share, so that no tenant's flood evicts shared blocks. No
tenant can have this name."""

GUARD_S = 60.0
"""For this many seconds after a tenant's last request, its idle blocks also limit the running requests of others. A
longer guard would leave a replica idle to keep caches that may never be used again."""

Q = TypeVar("Q", bound=Sized)
"""A tenant's evictable blocks, in eviction order."""


@dataclass(slots=True, eq=False)
class Account(Generic[Q]):
    """One tenant's holdings: ``held`` in all, ``idle`` only in the cache; ``queue``: its evictable blocks.

    ``number``: ascending by creation. ``listed``: its excess in the ranking, None while it is not there.
    ``kept``: its part of the pool's protected blocks.
    """

    tenant: str
    weight: float
    queue: Q
    number: int = 0
    listed: float | None = None
    kept: int = 0
    held: int = 0
    idle: int = 0
    used_s: float = -math.inf

    def excess(self, since_s: float) -> float:
        """Return the holdings by weight, to compare tenants; infinity without requests since ``since_s``."""
        return self.held / self.weight if self.used_s >= since_s else math.inf


class Accounts(Generic[Q]):
    """Accounts by tenant, of weight 1.0 by default. A tenant unseen for ``active_s`` has no share.

    ``queue``: creates a tenant's empty queue. Call ``rank`` after an account's holdings or its queue grew.
    """

    def __init__(
        self, weights: Mapping[str, float], clock: Callable[[], float], active_s: float, queue: Callable[[], Q]
    ) -> None:
        # Public blocks serve all tenants, so they narrow no tenant's share.
        self.shares = Shares(weights, clock, active_s, outside=(PUBLIC,))
        self.clock = clock
        self._active_s = active_s
        self._queue = queue
        self._accounts: dict[str, Account[Q]] = {}
        self._numbers = count()
        self._ranking: list[tuple[float, int, int, Account[Q]]] = []
        """A heap by excess, the largest first. An entry counts if its account is ``listed`` with it."""
        self._ranked_at = 0
        """The number of ``shares.ends`` that the ranking knows."""

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Use new weights from now on."""
        self.shares.set_weights(weights)
        for tenant, account in self._accounts.items():
            account.weight = self.shares.weight(tenant)

    def holdings(self) -> dict[str, int]:
        """Return each tenant's holdings (any thread)."""
        return {tenant: account.held for tenant, account in self._accounts.copy().items() if account.held}

    def all(self) -> list[Account[Q]]:
        """Return every account."""
        return list(self._accounts.values())

    def seen_since(self, since_s: float) -> list[str]:
        """Return the tenants seen since a time of the clock."""
        return [tenant for tenant, account in self._accounts.items() if account.used_s >= since_s]

    def touch(self, tenant: str, ago_s: float = 0.0) -> Account[Q]:
        """Record a tenant's request that arrived ``ago_s`` seconds ago. The tenant is active from then on."""
        account = self.account(tenant)
        account.used_s = self.clock() - ago_s
        self.shares.touch(tenant, ago_s)
        return account

    def furthest(self) -> Account[Q] | None:
        """Return the account most over its share, among those with evictable blocks. O(log accounts), amortized."""
        since_s = self._settled_since_s()
        while self._ranking:
            minus_excess, *_, account = self._ranking[0]
            if account.listed != -minus_excess:
                heappop(self._ranking)
            elif not account.queue:
                account.listed = None
                heappop(self._ranking)
            elif account.listed != account.excess(since_s):  # it fell
                account.listed = account.excess(since_s)
                heapreplace(self._ranking, self._place(account, account.listed))
            else:
                return account
        return None

    def rank(self, account: Account[Q]) -> None:
        """Correct an account's place for ``furthest``. It falls by itself, but rises only here."""
        excess = account.excess(self._active_since_s())
        if account.queue and (account.listed is None or excess > account.listed):
            account.listed = excess
            heappush(self._ranking, self._place(account, excess))
            if len(self._ranking) > 2 * len(self._accounts) + 64:
                self._rank_all()

    def account(self, tenant: str) -> Account[Q]:
        """Return a tenant's account, created if missing. Inactive accounts without holdings are then dropped."""
        account = self._accounts.get(tenant)
        if account is None:
            since_s = self._active_since_s()
            kept = ((name, other) for name, other in self._accounts.items() if other.held or other.used_s >= since_s)
            self._accounts = dict(kept)
            weight = self.shares.weight(tenant)
            account = self._accounts[tenant] = Account(tenant, weight, self._queue(), next(self._numbers))
        return account

    def _rank_all(self) -> None:
        """Rank every account anew: some are inactive, or have other weights."""
        since_s, self._ranked_at = self._active_since_s(), self.shares.ends
        self._ranking = []
        for account in self._accounts.values():
            account.listed = account.excess(since_s) if account.queue else None
            if account.listed is not None:
                self._ranking.append(self._place(account, account.listed))
        heapify(self._ranking)

    def _place(self, account: Account[Q], excess: float) -> tuple[float, int, int, Account[Q]]:
        """Return an entry of the ranking: of equal ones the oldest account is first, and no two entries are equal."""
        return -excess, account.number, next(self._numbers), account

    def _settled_since_s(self) -> float:
        """Return the time since which tenants are active, with the accounts that no longer are ranked as such."""
        self.shares.settle()
        if self._ranked_at != self.shares.ends:
            self._rank_all()
        return self._active_since_s()

    def _active_since_s(self) -> float:
        return self.clock() - self._active_s


class PoolShares(Accounts[Q]):
    """Accounts of a pool's blocks; ``weights`` and ``queue`` as in ``Accounts``."""

    def __init__(
        self, total_blocks: int, weights: Mapping[str, float], clock: Callable[[], float], queue: Callable[[], Q]
    ) -> None:
        super().__init__(weights, clock, CACHE_ACTIVE_S, queue)
        self._total_blocks = total_blocks
        self._changed: set[Account[Q]] = set()
        """The accounts whose protected blocks may be others than ``kept``."""
        self._kept = 0
        self._kept_by = 0
        """The number of ``shares.changes`` that it was computed with."""
        self._next_unguarded_s = -math.inf

    def touch(self, tenant: str, ago_s: float = 0.0) -> Account[Q]:
        """See ``Accounts.touch``."""
        account = super().touch(tenant, ago_s)
        self._next_unguarded_s = min(self._next_unguarded_s, account.used_s)
        self._changed.add(account)
        return account

    def change(self, account: Account[Q], *, held: int = 0, idle: int = 0) -> None:
        """Add to an account's blocks."""
        account.held += held
        account.idle += idle
        self._changed.add(account)
        if held > 0:
            self.rank(account)

    def in_use(self, tenant: str) -> int:
        """Return the tenant's blocks that cannot be evicted now."""
        account = self._accounts.get(tenant)
        return account.held - account.idle if account is not None else 0

    def over_share(self, tenant: str) -> float:
        """Return the tenant's blocks in use, divided by its weight, if they exceed its share, else 0.0."""
        in_use = self.in_use(tenant)
        if in_use <= self.shares.fraction(tenant) * self._total_blocks:
            return 0.0
        return in_use / self._accounts[tenant].weight

    def protected(self, tenant: str) -> int:
        """Return the idle blocks within the shares of other tenants seen in the last ``GUARD_S``."""
        self.shares.settle()
        since_s = self.clock() - GUARD_S
        if since_s > self._next_unguarded_s or self.shares.changes != self._kept_by:
            self._kept_by = self.shares.changes
            self._changed.update(self._accounts.values())
            guarded = (account.used_s for account in self._accounts.values() if account.used_s >= since_s)
            self._next_unguarded_s = min(guarded, default=math.inf)
        for account in self._changed:
            before, account.kept = account.kept, 0
            if account.used_s >= since_s:
                share = int(self._total_blocks * self.shares.fraction(account.tenant))
                account.kept = min(account.idle, max(0, share - (account.held - account.idle)))
            self._kept += account.kept - before
        self._changed.clear()
        own = self._accounts.get(tenant)
        return self._kept - (own.kept if own is not None else 0)


class Quota(PoolShares[EvictionQueue[int]]):
    """The shares of the built-in engine's pool, and the account of each of its blocks."""

    def __init__(self, total_blocks: int, weights: Mapping[str, float], clock: Callable[[], float]) -> None:
        super().__init__(total_blocks, weights, clock, EvictionQueue)
        self._owners: list[Account[EvictionQueue[int]] | None] = [None] * total_blocks

    def tenant_of(self, block: int) -> str:
        """Return the tenant that owns a taken block."""
        return self._owner(block).tenant

    def take(self, blocks: Sequence[int], tenant: str) -> None:
        """Assign free blocks to a tenant."""
        account = self.touch(tenant)
        for block in blocks:
            self._owners[block] = account
        self.change(account, held=len(blocks))

    def hand_over(self, block: int, tenant: str) -> None:
        """Reassign a block in use to another tenant."""
        account = self.touch(tenant)
        before = self._owner(block)
        if before is not account:
            self.freed(block, idle=False)
            self._owners[block] = account
            self.change(account, held=1)

    def read(self, block: int) -> None:
        """Record a hit that begins with ``block``. Public blocks have a share as long as requests read them."""
        if self._owner(block).tenant == PUBLIC:
            self.touch(PUBLIC)

    def reused(self, block: int) -> None:
        """Record that an idle block is in use again."""
        account = self._owner(block)
        self.change(account, idle=-1)
        account.queue.discard(block)

    def idled(self, block: int) -> None:
        """Record that a block in use has become idle."""
        self.change(self._owner(block), idle=1)

    def freed(self, block: int, *, idle: bool) -> None:
        """Remove a block from its account. ``idle``: whether it was idle."""
        account = self._owner(block)
        self._owners[block] = None
        self.change(account, held=-1, idle=-idle)
        account.queue.discard(block)

    def queue_leaf(self, block: int, used: int, standing: Standing) -> None:
        """Queue an idle leaf for eviction."""
        account = self._owner(block)
        account.queue.put(block, used, standing)
        self.rank(account)

    def next_leaf(self) -> int:
        """Remove and return the next block to evict, of the tenant most over its share. Raises IndexError if none."""
        account = self.furthest()
        if account is None:
            raise IndexError("no block can be evicted")
        block = account.queue.first()
        account.queue.discard(block)
        return block

    def _owner(self, block: int) -> Account[EvictionQueue[int]]:
        account = self._owners[block]
        assert account is not None, f"block {block} has no owner"
        return account
