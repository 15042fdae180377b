"""The free blocks of vLLM's pool, in one line a tenant: what is evicted is of whoever is over its share.

Stands in for ``FreeKVCacheBlockQueue``. Blocks that hold nothing go first, then the least recently used of the tenant
with most for its weight; each line is vLLM's own queue, so one tenant's blocks go in vLLM's own order, the end of a
prompt before its beginning. vLLM removes them from its map and tells so, as it does with its own queue.
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
    """vLLM's queue, which has a length."""

    def __init__(self, blocks: Sequence[Any] = ()) -> None:
        super().__init__(list(blocks))

    def __len__(self) -> int:
        return int(self.num_free_blocks)


class TenantFreeQueue:
    """``taker``: whose request takes the next blocks, "" for nobody's. ``shares``: what each tenant holds.

    ``blocks``: those that are free, in their order; ``total_blocks``: of the pool, numbered from 0.
    A block belongs to who took it, whoever reads it, until it is handed over, taken again or let go of without content.
    """

    def __init__(self, blocks: Sequence[Any], total_blocks: int, clock: Clock = time.monotonic) -> None:
        self.num_free_blocks = len(blocks)
        self.taker = ""
        self.shares: PoolShares[Line] = PoolShares(total_blocks, {}, clock, Line)
        self._empty = Line(blocks)
        self._owners: list[Account[Line] | None] = [None] * total_blocks

    def popleft(self) -> Any:
        """Take one block. Raises ValueError where none is free."""
        if not self.num_free_blocks:
            raise ValueError("No free blocks available")
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[Any]:
        """Take ``n`` blocks for ``taker``, of those that are free."""
        if not n:
            return []
        assert self.num_free_blocks >= n
        self.num_free_blocks -= n
        taker = self._taker()
        taken: list[Any] = self._empty.popleft_n(min(n, len(self._empty)))
        taker.held += len(taken)
        while len(taken) < n:
            giver = self.shares.furthest()
            assert giver is not None
            # With its own blocks a taker stays the furthest; with another's that may change with each.
            blocks = giver.queue.popleft_n(min(n - len(taken), len(giver.queue)) if giver is taker else 1)
            giver.held -= len(blocks)
            giver.idle -= len(blocks)
            taker.held += len(blocks)
            taken += blocks
        for block in taken:
            self._owners[block.block_id] = taker
        return taken

    def remove(self, block: Any) -> None:
        """Take a block that is used again."""
        owner = self._owners[block.block_id]
        if owner is None:
            self._empty.remove(block)
            owner = self._owners[block.block_id] = self._taker()
            owner.held += 1
        else:
            owner.queue.remove(block)
            owner.idle -= 1
        self.num_free_blocks -= 1

    def append(self, block: Any) -> None:
        """Let a block go that may be used again, after all others of its owner."""
        self.append_n([block])

    def append_n(self, blocks: list[Any]) -> None:
        """Let blocks go that may be used again, after all others of their owners."""
        for owner, run in groupby(blocks, lambda block: self._owners[block.block_id]):
            assert owner is not None
            released = list(run)
            owner.queue.append_n(released)
            owner.idle += len(released)
        self.num_free_blocks += len(blocks)

    def prepend_n(self, blocks: list[Any]) -> None:
        """Let blocks go that hold nothing: they are the first to be taken."""
        for block in blocks:
            self._let_go(block)
        self._empty.prepend_n(blocks)
        self.num_free_blocks += len(blocks)

    def hand_over(self, blocks: Sequence[Any], tenant: str) -> None:
        """Enter blocks in use under another tenant."""
        account = self.shares.touch(tenant)
        for block in blocks:
            owner = self._owners[block.block_id]
            if owner is not None:
                owner.held -= 1
                account.held += 1
                self._owners[block.block_id] = account

    def forget(self) -> None:
        """Note that no free block holds anything any more."""
        for account in self.shares.all():
            blocks = account.queue.popleft_n(len(account.queue))
            account.idle -= len(blocks)
            for block in blocks:
                self._let_go(block)
            self._empty.append_n(blocks)

    def get_all_free_blocks(self) -> list[Any]:
        """Return what is free, tenant by tenant. For tests and for whoever looks."""
        lines = [self._empty, *(account.queue for account in self.shares.all())]
        return [block for line in lines for block in line.get_all_free_blocks()]

    def _taker(self) -> Account[Line]:
        # What is nobody's has no share: it is the first to go.
        return self.shares.touch(self.taker) if self.taker else self.shares.account("")

    def _let_go(self, block: Any) -> None:
        owner = self._owners[block.block_id]
        if owner is not None:
            owner.held -= 1
            self._owners[block.block_id] = None
