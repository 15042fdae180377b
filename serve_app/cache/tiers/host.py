"""Evicted blocks in host memory: one slab with tenants' shares and least-recently-used eviction."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from serve_app.cache.kv_chain import Row
from serve_app.cache.prefix.quota import CACHE_ACTIVE_S
from serve_app.cache.prefix_digest import TierBlock
from serve_app.cache.tiers.tier import ReadRows, Tier, TierParts, Wanted
from serve_app.cache.tiers.tier_index import Entry, TierIndex


def open_host(parts: TierParts, below: Tier | None) -> Tier | None:
    """Return the tier, or None if it is off. Raises ValueError."""
    if not parts.settings.host_cache_bytes:
        return None
    parts.check_bound("host_cache_bytes", parts.settings.host_cache_bytes)
    return HostTier(parts, below)


@dataclass(slots=True, eq=False)
class HostEntry(Entry):
    """A block in host memory. ``slot``: its row in the slab."""

    slot: int = -1


class HostSlab(TierIndex[HostEntry]):
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


class HostTier(Tier):
    """Host memory; the loop alone uses it, so its blocks need no load."""

    name = "host"
    expected_bytes_per_s = 4e9

    def __init__(self, parts: TierParts, below: Tier | None) -> None:
        super().__init__(parts, below)
        bound, row_bytes = parts.settings.host_cache_bytes, parts.format.block_bytes
        self.index: HostSlab = HostSlab(bound, parts.size_bytes, row_bytes, parts.shares, parts.clock)
        self.counts = self.index.counts

    def holds(self, block: Wanted | TierBlock) -> bool:
        """Return whether a block is here."""
        stored = self.index.find(block.block_hash)
        return stored is not None and stored.prefix_digest == block.prefix_digest

    def row(self, block_hash: bytes) -> Row | None:
        """Return a block's bytes, a view until the next ``put``."""
        return self.index.row(block_hash) if block_hash in self.index else None

    def use(self, hashes: Sequence[bytes]) -> None:
        """Mark blocks as the most recently used."""
        for block_hash in hashes:
            if block_hash in self.index:
                self.index.use(block_hash)

    def clear(self) -> None:
        """Forget all blocks."""
        self.index.clear()

    def put(self, blocks: Sequence[TierBlock], read: ReadRows, saved_until_s: float | None = None) -> bool:
        """Store a batch, in parts that fit."""
        step = self.index.capacity_blocks
        for start in range(0, len(blocks), step):
            self._put(blocks[start : start + step], start, read)
        return True

    def close(self, deadline_s: float) -> None:
        """Give all blocks to the tier below."""
        if self.below is not None:
            for entry in self.index:
                self.below.wait_for_room(1, deadline_s)
                self._give(self.below, entry.block)

    def _put(self, batch: Sequence[TierBlock], base: int, read: ReadRows) -> None:
        host = self.index
        self.use([block.block_hash for block in batch])
        fresh: dict[bytes, tuple[int, Row]] = {}
        for i, block in enumerate(batch):
            stored = host.find(block.block_hash)
            if stored is None:
                if host.full:
                    victim = host.next_victim(block.owner)
                    assert victim is not None, "nothing is saved in host memory"
                    if victim.block.block_hash in fresh:  # from this batch: its owner has no other space
                        self._fill(fresh, read)
                    if self.below is not None:
                        self._give(self.below, victim.block)
                    host.remove(victim.block.block_hash)
                    host.counts.evicted_blocks += 1
                fresh[block.block_hash] = (base + i, host.put(block))
            elif stored.prefix_digest == block.prefix_digest:
                host.use(block.block_hash)
            else:
                host.counts.drops += 1
        self._fill(fresh, read)

    def _fill(self, fresh: dict[bytes, tuple[int, Row]], read: ReadRows) -> None:
        """Fill the new rows from the pool, and empty ``fresh``."""
        if fresh:
            blocks, rows = zip(*fresh.values(), strict=True)
            read(blocks, rows)
            self.counts.stores += len(rows)
            fresh.clear()

    def _give(self, below: Tier, block: TierBlock) -> None:
        row = self.index.row(block.block_hash)
        below.put([block], lambda _, rows: np.copyto(rows[0], row))
