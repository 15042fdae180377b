"""Blocks that left the pool, in host memory: one slab, by tenants' shares, least recently used first out.

Owns the slab. The engine's loop owns it. Callers touch and put children before their parents, so a parent always
outlives its children of the same tenant here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from serve_app.cache.kv_chain import Row
from serve_app.cache.prefix.quota import ACTIVE_S
from serve_app.cache.prefix_digest import TierBlock
from serve_app.cache.tiers.tier_index import Entry, TierIndex


@dataclass(slots=True, eq=False)
class _Held(Entry):
    slot: int = -1


class HostTier:
    """At most ``capacity_bytes`` of blocks of ``size_bytes`` each; a slab row holds ``row_bytes`` of it.

    (A simulated engine's blocks have a size and no bytes.) ``index``: who holds what.
    """

    def __init__(
        self,
        capacity_bytes: int,
        size_bytes: int,
        row_bytes: int,
        shares: Mapping[str, float],
        clock: Callable[[], float],
    ) -> None:
        self.size_bytes = size_bytes
        self.capacity_blocks = capacity_bytes // size_bytes
        self.index: TierIndex[_Held] = TierIndex(shares, clock, ACTIVE_S)
        # Untouched pages of an empty array take no memory, so the slab grows with its use.
        self._slab = np.empty((self.capacity_blocks, row_bytes), dtype=np.uint8)
        self._free = list(range(self.capacity_blocks - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.index)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self.index

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks held."""
        return self.index.used_bytes

    @property
    def full(self) -> bool:
        """Whether a new block needs another's room."""
        return not self._free

    def blocks(self) -> Iterator[TierBlock]:
        """Yield what is held, least recently used first."""
        return (held.block for held in self.index)

    def get(self, block_hash: bytes) -> TierBlock | None:
        """Return what is known of a held block."""
        held = self.index.get(block_hash)
        return held.block if held else None

    def row(self, block_hash: bytes) -> Row:
        """Return a held block's bytes, a view until it is evicted. Raises KeyError."""
        row: Row = self._slab[self.index[block_hash].slot]
        return row

    def touch(self, block_hash: bytes) -> None:
        """Make a held block the most recently used one. Raises KeyError."""
        self.index.use(block_hash)

    def put(self, block: TierBlock) -> Row:
        """Take a block that is not held and return the row to fill. The tier must not be full."""
        slot = self._free.pop()
        self.index.add(_Held(block, self.size_bytes, slot=slot))
        row: Row = self._slab[slot]
        return row

    def next_victim(self, owner: str) -> TierBlock:
        """Return which block of a full tier has to go for one of ``owner``'s."""
        victim = self.index.next_victim(owner)
        assert victim is not None  # nothing is saved here
        return victim.block

    def evict(self, block_hash: bytes) -> None:
        """Forget a held block. Raises KeyError."""
        self._free.append(self.index.remove(block_hash).slot)

    def clear(self) -> None:
        """Forget everything."""
        self._free.extend(held.slot for held in self.index)
        self.index.clear()
