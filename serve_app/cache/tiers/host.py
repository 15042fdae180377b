"""Evicted blocks in host memory: one slab with tenants' shares and least-recently-used eviction.

The engine's loop owns it. Callers use and put children before their parents, so that parents are evicted later.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from serve_app.cache.kv_chain import Row
from serve_app.cache.prefix.quota import CACHE_ACTIVE_S
from serve_app.cache.prefix_digest import TierBlock
from serve_app.cache.tiers.tier_index import Entry, TierIndex


@dataclass(slots=True, eq=False)
class HostEntry(Entry):
    """A block in host memory. ``slot``: its row in the slab."""

    slot: int = -1


class HostTier(TierIndex[HostEntry]):
    """At most ``capacity_bytes`` of blocks with ``size_bytes``. A slab row has ``row_bytes``, 0 if simulated."""

    def __init__(
        self,
        capacity_bytes: int,
        size_bytes: int,
        row_bytes: int,
        shares: Mapping[str, float],
        clock: Callable[[], float],
    ) -> None:
        super().__init__("host", shares, clock, CACHE_ACTIVE_S)
        self.size_bytes = size_bytes
        self.capacity_blocks = capacity_bytes // size_bytes
        # Untouched pages of an empty array use no memory, so the slab grows with its use.
        self._slab = np.empty((self.capacity_blocks, row_bytes), dtype=np.uint8)
        self._free = list(range(self.capacity_blocks - 1, -1, -1))

    @property
    def full(self) -> bool:
        """Whether a new block requires an eviction."""
        return not self._free

    def row(self, block_hash: bytes) -> Row:
        """Return a held block's bytes, a view until it is removed. Raises KeyError."""
        row: Row = self._slab[self[block_hash].slot]
        return row

    def put(self, block: TierBlock) -> Row:
        """Add a block that is not held, and return the row to fill. The tier must not be full."""
        self.add(HostEntry(block, self.size_bytes, slot=self._free.pop()))
        return self.row(block.block_hash)

    def remove(self, block_hash: bytes) -> HostEntry:
        """Forget a held block. Raises KeyError."""
        entry = super().remove(block_hash)
        self._free.append(entry.slot)
        return entry

    def clear(self) -> None:
        """Forget every block."""
        self._free.extend(entry.slot for entry in self)
        super().clear()
