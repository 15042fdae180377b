"""Tenants' shares of a block pool: who holds which blocks, and whose block is evicted next.

Owns the tenants' accounts and their leaves in LRU order. Laws: the accounts add up to the pool's taken blocks; nobody
at or under their share gives up a block while somebody over theirs has one to give; room that nobody needs can be
borrowed. Not thread-safe, except ``holdings``.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

ACTIVE_S = 600.0
"""Seconds without a request after which a tenant has no share, and its blocks are the first to go, until the next."""

PUBLIC = "(public)"
"""The account of public prompts' blocks, with a share of its own: no tenant's flood takes what all use. No tenant can
have this name."""

GUARD_S = 60.0
"""Seconds after a tenant's last request for which its idle blocks also limit how much others may run at once: a
longer guard would leave a replica idle for the sake of caches that may never be asked for again."""

Evictable = Callable[[int, int], bool]
"""(tick of the block's last release, block) -> whether that entry of a line still stands for an evictable leaf."""


@dataclass(slots=True, eq=False)
class Account:
    """One tenant's blocks: ``held`` in all, ``idle`` of them held by the cache alone."""

    tenant: str
    weight: float
    held: int = 0
    idle: int = 0
    active: bool = False
    used_s: float = 0.0
    leaves: list[tuple[int, int]] = field(default_factory=list)
    queued: float | None = None

    @property
    def excess(self) -> float:
        """How far over its share: blocks by weight, which orders tenants as excess over any common share does."""
        return self.held / self.weight if self.active else math.inf


class Quota:
    """Accounts by tenant. ``weights``: by tenant, 1.0 where none is given. Every call is O(log n) or better."""

    def __init__(self, total_blocks: int, weights: Mapping[str, float], clock: Callable[[], float]) -> None:
        if any(not 0.0 < weight < math.inf for weight in weights.values()):
            raise ValueError("a tenant's share must be a finite number over 0")
        self._total_blocks = total_blocks
        self._weights = dict(weights)
        self._clock = clock
        self._owners: list[Account | None] = [None] * total_blocks
        self._accounts: dict[str, Account] = {}
        self._recent: OrderedDict[str, Account] = OrderedDict()
        self._active_weight = 0.0
        self._line: list[tuple[float, int, Account]] = []
        self._ticks = 0

    def holdings(self) -> dict[str, int]:
        """Return the blocks each tenant holds (any thread)."""
        return {tenant: account.held for tenant, account in self._accounts.copy().items() if account.held}

    def fraction(self, tenant: str) -> float:
        """Return the part of the pool that is ``tenant``'s share among the tenants active now.

        Where several tenants are configured, one that is alone counts as one of two: a share has to be ready for
        whoever comes next.
        """
        account = self._accounts.get(tenant)
        weight = account.weight if account is not None else self._weights.get(tenant, 1.0)
        others = self._active_weight - (weight if account is not None and account.active else 0.0)
        shared = self._recent.get(PUBLIC)
        if shared is not None:  # what is public is used on everybody's behalf: it narrows nobody's share of the room
            others -= shared.weight
        if len(self._recent) - (shared is not None) <= 1 and len(self._weights) > 1:
            others = max(others, 1.0)
        return weight / (weight + max(others, 0.0))

    def in_use(self, tenant: str) -> int:
        """Return the tenant's blocks that cannot be evicted now."""
        account = self._accounts.get(tenant)
        return account.held - account.idle if account is not None else 0

    def over_share(self, tenant: str) -> float:
        """Return the tenant's blocks in use by weight if they are more than its share, else 0.0."""
        in_use = self.in_use(tenant)
        if in_use <= self.fraction(tenant) * self._total_blocks:
            return 0.0
        return in_use / self._accounts[tenant].weight

    def protected(self, tenant: str) -> int:
        """Return the idle blocks within the shares of other tenants seen in the last ``GUARD_S``. O(such tenants)."""
        kept, since_s = 0, self._clock() - GUARD_S
        for name, account in reversed(self._recent.items()):
            if account.used_s < since_s:
                break
            if name != tenant and account.idle:
                within = int(self._total_blocks * account.weight / self._active_weight) - (account.held - account.idle)
                kept += min(account.idle, max(0, within))
        return kept

    def touch(self, tenant: str) -> Account:
        """Note a request of a tenant: it is active from now on."""
        now_s = self._clock()
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = Account(tenant, self._weights.get(tenant, 1.0))
        account.used_s = now_s
        if not account.active:
            account.active = True
            self._active_weight += account.weight
            self._recent[tenant] = account
        else:
            self._recent.move_to_end(tenant)
        self._retire(now_s)
        return account

    def take(self, blocks: Sequence[int], tenant: str) -> None:
        """Enter blocks that were free under a tenant."""
        account = self.touch(tenant)
        for block in blocks:
            self._owners[block] = account
        account.held += len(blocks)
        self._queue(account)

    def hand_over(self, block: int, tenant: str) -> None:
        """Enter a block in use under another tenant."""
        account = self.touch(tenant)
        before = self._owner(block)
        if before is not account:
            self.freed(block, idle=False)
            self._owners[block] = account
            account.held += 1
            self._queue(account)

    def read(self, block: int) -> None:
        """Note a hit that begins with ``block``: what is public has a share as long as anybody reads it."""
        if self._owner(block).tenant == PUBLIC:
            self.touch(PUBLIC)

    def reused(self, block: int) -> None:
        """Note that an idle block is in use again."""
        self._owner(block).idle -= 1

    def idled(self, block: int) -> None:
        """Note that a block in use is idle now."""
        self._owner(block).idle += 1

    def freed(self, block: int, *, idle: bool) -> None:
        """Strike a block out; ``idle``: what it was until now."""
        account = self._owner(block)
        self._owners[block] = None
        account.held -= 1
        account.idle -= idle
        if not account.held and not account.active:
            del self._accounts[account.tenant]

    def queue_leaf(self, released_at: int, block: int, evictable: Evictable) -> None:
        """Put an idle leaf at the end of its owner's line. Stale entries are dropped once they are the most."""
        account = self._owner(block)
        heapq.heappush(account.leaves, (released_at, block))
        if len(account.leaves) > 2 * account.held + 64:
            account.leaves = [leaf for leaf in set(account.leaves) if evictable(*leaf)]
            heapq.heapify(account.leaves)
        self._queue(account)

    def next_leaf(self, evictable: Evictable) -> int:
        """Return the block to evict: the oldest leaf of whoever is most over their share. The caller frees it.

        Raises IndexError when there is none.
        """
        self._retire(self._clock())
        while True:
            key, _, account = heapq.heappop(self._line)
            if account.queued != -key:
                continue
            account.queued = None
            if account.excess < -key:
                self._queue(account)
                continue
            while account.leaves:
                leaf = heapq.heappop(account.leaves)
                if evictable(*leaf):
                    self._queue(account)
                    return leaf[1]

    def _owner(self, block: int) -> Account:
        account = self._owners[block]
        assert account is not None, f"block {block} belongs to nobody"
        return account

    def _queue(self, account: Account) -> None:
        """See that the account stands in the line at least as far ahead as its excess asks for."""
        excess = account.excess
        if not account.leaves or (account.queued is not None and account.queued >= excess):
            return
        account.queued = excess
        self._ticks += 1
        heapq.heappush(self._line, (-excess, self._ticks, account))
        if len(self._line) > 2 * len(self._accounts) + 64:
            self._line = [entry for entry in self._line if entry[2].queued == -entry[0]]
            heapq.heapify(self._line)

    def _retire(self, now_s: float) -> None:
        """Take their shares from tenants that have not been seen for long."""
        while self._recent:
            tenant, account = next(iter(self._recent.items()))
            if now_s - account.used_s <= ACTIVE_S:
                return
            del self._recent[tenant]
            account.active = False
            self._active_weight = self._active_weight - account.weight if self._recent else 0.0
            if not account.held:
                del self._accounts[tenant]
            else:
                self._queue(account)
