"""A map from 64-bit block keys to small positive integers, in about 22 bytes an entry.

Owns the memory of the directory: open addressing in shards of two flat arrays each, so that growing or sweeping
is bounded work (one shard) and never a pause over all entries. Knows nothing of replicas: values are opaque, 0
means absent. Python objects are made per look-up, none per entry, so the garbage collector sees nothing. What a
look-up touches lies apart from what it does not: with a million entries it is the misses of the CPU's caches that cost.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import cache

import numpy as np

_EMPTY = 0
_TOMBSTONE = 1
SHARD_SHIFT = 40
_FIRST_SLOTS = 8

Change = tuple[int, int, int]
"""(old value, new value, how many entries in a row changed so)."""


def block_keys(hashes: bytes) -> list[int]:
    """Return the 64-bit keys of packed 16-byte hashes. A trailing partial hash is ignored.

    A key is the first 8 bytes. The two values that mark free slots are moved aside; looked up as they are, they
    are found absent, so that a look-up needs no such care.
    """
    whole = len(hashes) // 16
    words = np.frombuffer(hashes, dtype="<u8", count=2 * whole)[::2]
    keys: list[int] = (words + (words <= _TOMBSTONE) * np.uint64(_TOMBSTONE + 1)).tolist()
    return keys


class BlockTable:
    """Key -> value with bounded entries. Not thread-safe.

    By shard: ``keys`` and ``values`` of its slots, the slot mask in ``masks``; for look-ups in line, never to write.
    """

    def __init__(self, max_entries: int) -> None:
        self.max_entries = max_entries
        self.num_entries = 0
        self.num_refused = 0
        shards = 64
        while shards * 4096 < max_entries:
            shards *= 2
        self.shard_mask = shards - 1
        self.keys = [_new_keys(_FIRST_SLOTS) for _ in range(shards)]
        self.values = [_new_values(_FIRST_SLOTS) for _ in range(shards)]
        self.masks = [_mask_of(_FIRST_SLOTS)] * shards
        self._used = [0] * shards

    @property
    def num_shards(self) -> int:
        """How many shards ``rebuild`` has to visit to have seen every entry."""
        return self.shard_mask + 1

    @property
    def size_bytes(self) -> int:
        """Bytes of the arrays and their headers."""
        slots = sum(mask + 1 for mask in self.masks)
        return 12 * slots + 400 * self.num_shards

    def get(self, key: int) -> int:
        """Return the value of ``key``, 0 when it is absent."""
        shard = (key >> SHARD_SHIFT) & self.shard_mask
        keys, mask = self.keys[shard], self.masks[shard]
        slot = key & mask
        while True:
            found = keys[slot]
            if found == key:
                return self.values[shard][slot]
            if found == _EMPTY:
                return 0
            slot = (slot + 1) & mask

    def update(self, keys: list[int], step: Callable[[int], int], max_entries: int | None = None) -> list[Change]:
        """Replace every key's value v (0: absent) by ``step(v)`` (0: remove) and return what changed.

        ``step`` is asked once for each distinct old value, so it must be a function. A new key beyond
        ``max_entries`` (the table's own, or a lower one for this call) is refused and counted in ``num_refused``.
        """
        limit = self.max_entries if max_entries is None else max_entries
        shard_mask = self.shard_mask
        known: dict[int, int] = {}
        changes: list[Change] = []
        run_old = run_new = run = 0
        for key in keys:
            shard = (key >> SHARD_SHIFT) & shard_mask
            slots, values, mask = self.keys[shard], self.values[shard], self.masks[shard]
            slot = key & mask
            tombstone = -1
            while True:
                found = slots[slot]
                if found == key:
                    old = values[slot]
                    break
                if found == _EMPTY:
                    old = 0
                    break
                if found == _TOMBSTONE and tombstone < 0:
                    tombstone = slot
                slot = (slot + 1) & mask
            new = known.get(old, -1)
            if new < 0:
                new = known[old] = step(old)
            if new == old:
                continue
            if old == 0:
                if self.num_entries >= limit:
                    self.num_refused += 1
                    continue
                self.num_entries += 1
                if tombstone >= 0:
                    slot = tombstone
                else:
                    self._used[shard] += 1
                slots[slot] = key
                values[slot] = new
                if 4 * self._used[shard] > 3 * mask:
                    self._rehash(shard, None)
            elif new == 0:
                self.num_entries -= 1
                self._remove(shard, slot)
            else:
                values[slot] = new
            if old == run_old and new == run_new:
                run += 1
            else:
                if run:
                    changes.append((run_old, run_new, run))
                run_old, run_new, run = old, new, 1
        if run:
            changes.append((run_old, run_new, run))
        return changes

    def rebuild(self, shard: int, step: Callable[[int], int]) -> list[Change]:
        """Replace every value of one shard by ``step(value)``, drop those that become 0, and shrink to fit."""
        counts = self._rehash(shard, step)
        self.num_entries -= sum(count for _, new, count in counts if new == 0)
        return counts

    def _remove(self, shard: int, slot: int) -> None:
        """Free a slot: empty it when the run ends behind it (and the tombstones before it too), else leave a mark."""
        keys, mask = self.keys[shard], self.masks[shard]
        self.values[shard][slot] = 0
        if keys[(slot + 1) & mask] != _EMPTY:
            keys[slot] = _TOMBSTONE
            return
        keys[slot] = _EMPTY
        freed = 1
        slot = (slot - 1) & mask
        while keys[slot] == _TOMBSTONE:
            keys[slot] = _EMPTY
            freed += 1
            slot = (slot - 1) & mask
        self._used[shard] -= freed

    def _rehash(self, shard: int, step: Callable[[int], int] | None) -> list[Change]:
        """Move a shard's entries into arrays of the right size, mapping values through ``step`` on the way."""
        known: dict[int, int] = {}
        counts: dict[int, int] = {}
        kept: list[tuple[int, int]] = []
        for key, value in zip(self.keys[shard], self.values[shard], strict=True):
            if not value:
                continue
            if step is not None:
                counts[value] = counts.get(value, 0) + 1
                new = known.get(value, -1)
                if new < 0:
                    new = known[value] = step(value)
                if not new:
                    continue
                value = new
            kept.append((key, value))
        slots = _FIRST_SLOTS
        while slots * 5 < len(kept) * 8:  # at most 5/8 full, so that the next growth is some way off
            slots *= 2
        keys, values, mask = _new_keys(slots), _new_values(slots), _mask_of(slots)
        for key, value in kept:
            slot = key & mask
            while keys[slot]:
                slot = (slot + 1) & mask
            keys[slot] = key
            values[slot] = value
        self.keys[shard], self.values[shard], self.masks[shard] = keys, values, mask
        self._used[shard] = len(kept)
        return [(value, known[value], count) for value, count in counts.items()]


def _new_keys(slots: int) -> array[int]:
    return array("Q", bytes(8 * slots))


def _new_values(slots: int) -> array[int]:
    return array("I", bytes(4 * slots))


@cache
def _mask_of(slots: int) -> int:
    """Return the slot mask; one object for all shards of a size, so that it stays in the CPU's cache."""
    return slots - 1
