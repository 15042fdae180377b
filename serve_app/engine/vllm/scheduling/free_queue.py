"""The free blocks of vLLM's pool in one queue per tenant: evictions hit the tenants that are over their share.

Replaces ``FreeKVCacheBlockQueue``. Empty blocks go first, then the least recently used ones of the tenant with the most
for its weight. Each queue is vLLM's own, so one tenant's blocks go in vLLM's own order, the end of a prompt before its
beginning. vLLM removes them from its map and reports that, as with its own queue.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

from serve_app.cache.prefix.quota import Account, PoolShares
from serve_app.engine.protocol import Clock


class Line(FreeKVCacheBlockQueue):  # type: ignore[misc]
    """vLLM's queue with a length."""

    def __init__(self, blocks: Sequence[Any] = ()) -> None:
        super().__init__(list(blocks))

    def __len__(self) -> int:
        return int(self.num_free_blocks)


class TenantFreeQueue:
    """``taker``: the tenant that takes the next blocks, "" for none. ``shares``: the blocks that each tenant holds.

    ``blocks``: the free ones, in their order; ``total_blocks``: of the pool, numbered from 0. A block belongs to the
    tenant that took it, regardless of readers, until it is handed over, taken again or released without content.
    """

    def __init__(self, blocks: Sequence[Any], total_blocks: int, clock: Clock = time.monotonic) -> None:
        self.num_free_blocks = len(blocks)
        self.taker = ""
        self.shares: PoolShares[Line] = PoolShares(total_blocks, {}, clock, Line)
        self._empty = Line(blocks)
        self._owners: list[Account[Line] | None] = [None] * total_blocks

    def popleft(self) -> Any:
        """Take one block. Raises ValueError if none is free."""
        if not self.num_free_blocks:
            raise ValueError("No free blocks available")
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[Any]:
        """Take ``n`` free blocks for ``taker``."""
        if not n:
            return []
        assert self.num_free_blocks >= n
        self.num_free_blocks -= n
        taker = self._taker()
        taken: list[Any] = self._empty.popleft_n(min(n, len(self._empty)))
        self.shares.change(taker, held=len(taken))
        while len(taken) < n:
            giver = self.shares.furthest()
            assert giver is not None
            # A taker that takes its own blocks stays the furthest; taking another's may change that with each block.
            blocks = giver.queue.popleft_n(min(n - len(taken), len(giver.queue)) if giver is taker else 1)
            self.shares.change(giver, held=-len(blocks), idle=-len(blocks))
            self.shares.change(taker, held=len(blocks))
            taken += blocks
        for block in taken:
            self._owners[block.block_id] = taker
        return taken

    def remove(self, block: Any) -> None:
        """Take a free block that is used again."""
        owner = self._owners[block.block_id]
        if owner is None:
            self._empty.remove(block)
            owner = self._owners[block.block_id] = self._taker()
            self.shares.change(owner, held=1)
        else:
            owner.queue.remove(block)
            self.shares.change(owner, idle=-1)
        self.num_free_blocks -= 1

    def append(self, block: Any) -> None:
        """Release a reusable block, behind all others of its owner."""
        self.append_n([block])

    def append_n(self, blocks: list[Any]) -> None:
        """Release reusable blocks, behind all others of their owners."""
        for owner, run in groupby(blocks, lambda block: self._owners[block.block_id]):
            assert owner is not None
            released = list(run)
            owner.queue.append_n(released)
            self.shares.change(owner, idle=len(released))
            self.shares.rank(owner)
        self.num_free_blocks += len(blocks)

    def prepend_n(self, blocks: list[Any]) -> None:
        """Release empty blocks: they are the first to be taken."""
        for block in blocks:
            self._let_go(block)
        self._empty.prepend_n(blocks)
        self.num_free_blocks += len(blocks)

    def hand_over(self, blocks: Sequence[Any], tenant: str) -> None:
        """Charge blocks in use to another tenant."""
        account = self.shares.touch(tenant)
        for block in blocks:
            owner = self._owners[block.block_id]
            if owner is not None:
                self.shares.change(owner, held=-1)
                self.shares.change(account, held=1)
                self._owners[block.block_id] = account

    def forget(self) -> None:
        """Note that all free blocks are empty now."""
        for account in self.shares.all():
            blocks = account.queue.popleft_n(len(account.queue))
            self.shares.change(account, idle=-len(blocks))
            for block in blocks:
                self._let_go(block)
            self._empty.append_n(blocks)

    def get_all_free_blocks(self) -> list[Any]:
        """Return the free blocks, tenant by tenant. For tests and debugging."""
        lines = [self._empty, *(account.queue for account in self.shares.all())]
        return [block for line in lines for block in line.get_all_free_blocks()]

    def _taker(self) -> Account[Line]:
        # Blocks of no tenant have no share: they are evicted first.
        return self.shares.touch(self.taker) if self.taker else self.shares.account("")

    def _let_go(self, block: Any) -> None:
        owner = self._owners[block.block_id]
        if owner is not None:
            self.shares.change(owner, held=-1)
            self._owners[block.block_id] = None
