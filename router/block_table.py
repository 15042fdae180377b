"""A map from 64-bit block keys to small positive integers, in about 22 bytes an entry.

Owns the memory of the directory: open addressing in shards of two flat arrays each, so that growing or sweeping
is bounded work (one shard) and never a pause over all entries. Knows nothing of replicas: values are opaque, 0
means absent. Python objects are made per look-up, none per entry, so the garbage collector sees nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np

_EMPTY = 0
_TOMBSTONE = 1
SHARD_SHIFT = 40
_FIRST_SLOTS = 8

_Shard = list[Any]
"""[keys: array("Q"), values: array("I"), slot mask, slots in use]: a list unpacks faster than attributes load."""
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
    """Key -> value with bounded entries. Not thread-safe."""

    def __init__(self, max_entries: int) -> None:
        self.max_entries = max_entries
        self.num_entries = 0
        self.num_refused = 0
        shards = 64
        while shards * 4096 < max_entries:
            shards *= 2
        self.shard_mask = shards - 1
        self.shards: list[_Shard] = [_new_shard(_FIRST_SLOTS) for _ in range(shards)]

    @property
    def num_shards(self) -> int:
        """How many shards ``rebuild`` has to visit to have seen every entry."""
        return self.shard_mask + 1

    @property
    def size_bytes(self) -> int:
        """Bytes of the arrays and their headers."""
        slots: int = sum(shard[2] + 1 for shard in self.shards)
        return 12 * slots + 400 * self.num_shards

    def get(self, key: int) -> int:
        """Return the value of ``key``, 0 when it is absent."""
        keys, values, mask, _ = self.shards[(key >> SHARD_SHIFT) & self.shard_mask]
        slot = key & mask
        while True:
            found = keys[slot]
            if found == key:
                return int(values[slot])
            if found == _EMPTY:
                return 0
            slot = (slot + 1) & mask

    def update(self, keys: list[int], step: Callable[[int], int]) -> list[Change]:
        """Replace every key's value v (0: absent) by ``step(v)`` (0: remove) and return what changed.

        ``step`` is asked once for each distinct old value, so it must be a function. A new key beyond
        ``max_entries`` is refused and counted in ``num_refused``.
        """
        shards, shard_mask = self.shards, self.shard_mask
        known: dict[int, int] = {}
        changes: list[Change] = []
        run_old = run_new = run = 0
        for key in keys:
            shard = shards[(key >> SHARD_SHIFT) & shard_mask]
            slots, values, mask, used = shard
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
                if self.num_entries >= self.max_entries:
                    self.num_refused += 1
                    continue
                self.num_entries += 1
                if tombstone >= 0:
                    slot = tombstone
                else:
                    shard[3] = used + 1
                slots[slot] = key
                values[slot] = new
                if 4 * shard[3] > 3 * mask:
                    _rehash(shard, None)
            elif new == 0:
                self.num_entries -= 1
                _remove(shard, slot)
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

    def rebuild(self, shard_index: int, step: Callable[[int], int]) -> list[Change]:
        """Replace every value of one shard by ``step(value)``, drop those that become 0, and shrink to fit."""
        shard = self.shards[shard_index]
        counts = _rehash(shard, step)
        self.num_entries -= sum(count for _, new, count in counts if new == 0)
        return counts


def _new_shard(slots: int) -> _Shard:
    return [array("Q", bytes(8 * slots)), array("I", bytes(4 * slots)), slots - 1, 0]


def _remove(shard: _Shard, slot: int) -> None:
    """Free a slot: empty it when the run ends behind it (and the tombstones before it too), else leave a mark."""
    keys, values, mask, used = shard
    values[slot] = 0
    if keys[(slot + 1) & mask] != _EMPTY:
        keys[slot] = _TOMBSTONE
        return
    keys[slot] = _EMPTY
    used -= 1
    slot = (slot - 1) & mask
    while keys[slot] == _TOMBSTONE:
        keys[slot] = _EMPTY
        used -= 1
        slot = (slot - 1) & mask
    shard[3] = used


def _rehash(shard: _Shard, step: Callable[[int], int] | None) -> list[Change]:
    """Move a shard's entries into arrays of the right size, mapping values through ``step`` on the way."""
    old_keys, old_values = shard[0], shard[1]
    known: dict[int, int] = {}
    counts: dict[int, int] = {}
    kept: list[tuple[int, int]] = []
    for key, value in zip(old_keys, old_values, strict=True):
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
    fresh = _new_shard(slots)
    keys, values, mask = fresh[0], fresh[1], slots - 1
    for key, value in kept:
        slot = key & mask
        while keys[slot]:
            slot = (slot + 1) & mask
        keys[slot] = key
        values[slot] = value
    shard[:] = [keys, values, mask, len(kept)]
    return [(value, known[value], count) for value, count in counts.items()]
