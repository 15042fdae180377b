"""Blocks that left the pool, in host memory: one slab, least recently used first out.

Owns the slab, its index and its order. The engine's loop owns it. Callers touch and put children before their parents,
so a parent always outlives its children here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from serve_app.cache.kv_chain import Row
from serve_app.cache.prefix_digest import TierBlock


@dataclass(slots=True)
class _Held:
    block: TierBlock
    slot: int


class HostTier:
    """At most ``capacity_bytes`` of blocks of ``size_bytes`` each; a slab row holds ``row_bytes`` of it.

    (A simulated engine's blocks have a size and no bytes.)
    """

    def __init__(self, capacity_bytes: int, size_bytes: int, row_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.capacity_blocks = capacity_bytes // size_bytes
        # Untouched pages of an empty array take no memory, so the slab grows with its use.
        self._slab = np.empty((self.capacity_blocks, row_bytes), dtype=np.uint8)
        self._free = list(range(self.capacity_blocks - 1, -1, -1))
        self._held: OrderedDict[bytes, _Held] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._held

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks held."""
        return len(self._held) * self.size_bytes

    @property
    def full(self) -> bool:
        """Whether a new block needs another's room."""
        return not self._free

    def blocks(self) -> Iterator[TierBlock]:
        """Yield what is held, least recently used first."""
        return (held.block for held in self._held.values())

    def get(self, block_hash: bytes) -> TierBlock | None:
        """Return what is known of a held block."""
        held = self._held.get(block_hash)
        return held.block if held else None

    def row(self, block_hash: bytes) -> Row:
        """Return a held block's bytes, a view until it is evicted. Raises KeyError."""
        row: Row = self._slab[self._held[block_hash].slot]
        return row

    def touch(self, block_hash: bytes) -> None:
        """Make a held block the most recently used one. Raises KeyError."""
        self._held.move_to_end(block_hash)

    def put(self, block: TierBlock) -> Row:
        """Take a block that is not held and return the row to fill. The tier must not be full."""
        assert block.block_hash not in self._held
        slot = self._free.pop()
        self._held[block.block_hash] = _Held(block, slot)
        row: Row = self._slab[slot]
        return row

    def oldest(self) -> TierBlock:
        """Return the least recently used block. Raises StopIteration when nothing is held."""
        return next(iter(self._held.values())).block

    def evict(self, block_hash: bytes) -> None:
        """Forget a held block. Raises KeyError."""
        self._free.append(self._held.pop(block_hash).slot)

    def clear(self) -> None:
        """Forget everything."""
        self._free.extend(held.slot for held in self._held.values())
        self._held.clear()
