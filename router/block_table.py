"""What the directory is made of: sets of holders, and the map from blocks to them.

A holder is a slot (one bit) for a tier of a replica. Many blocks share a set, so sets are interned, and the map has
only the number of each block's set.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from sys import getsizeof

import numpy as np

from router.protocol.block_hash import HASH_BYTES, WORD_BITS, WORD_MASK


@dataclass(slots=True)
class ReplicaSlots:
    """One replica's slots, one bit for each tier. ``xor_of_tier``: the XOR of its block words (see ``block_word``)."""

    slot_of_tier: dict[str, int] = field(default_factory=dict)
    blocks_of_tier: dict[str, int] = field(default_factory=dict)
    xor_of_tier: dict[str, int] = field(default_factory=dict)
    refused_blocks: int = 0

    @property
    def home(self) -> int:
        """The first tier's slot."""
        return next(iter(self.slot_of_tier.values()))


def bits(mask: int) -> list[int]:
    """Return the positions of the set bits, lowest first."""
    positions = []
    while mask:
        low = mask & -mask
        positions.append(low.bit_length() - 1)
        mask ^= low
    return positions


class HolderSets:
    """Masks, their ids, and the number of blocks that refer to each id. Id 0, the empty set, is never freed."""

    def __init__(self) -> None:
        self.masks: list[int] = [0]
        self._refs: list[int] = [0]
        self._ids: dict[int, int] = {0: 0}
        self._free: list[int] = []

    @property
    def size_bytes(self) -> int:
        """Bytes of masks, ids and counts, with every mask at the size of the largest."""
        largest = max(map(getsizeof, self.masks[-64:]))
        return getsizeof(self.masks) + getsizeof(self._refs) + getsizeof(self._ids) + len(self._ids) * (largest + 32)

    def id_of(self, mask: int) -> int:
        """Return the id of a mask, and create it if needed. A new id stays only if ``count`` refers to it."""
        number = self._ids.get(mask)
        if number is not None:
            return number
        if self._free:
            fresh = self._free.pop()
            self.masks[fresh] = mask
        else:
            fresh = len(self.masks)
            self.masks.append(mask)
            self._refs.append(0)
        self._ids[mask] = fresh
        return fresh

    def count(self, changes: Iterable[Change], ids: Iterable[int]) -> None:
        """Count entries that moved between ids, then free the unused ones of the old and the passed ``ids``."""
        refs = self._refs
        touched = set(ids)
        for old, new, entries in changes:
            refs[old] -= entries
            refs[new] += entries
            touched.add(old)
        touched.discard(0)
        for candidate in touched:
            if refs[candidate] == 0:
                mask = self.masks[candidate]
                if self._ids.get(mask) == candidate:
                    del self._ids[mask]
                    self.masks[candidate] = 0
                    self._free.append(candidate)


VALUE_BITS = WORD_BITS
VALUE_MASK = WORD_MASK
MAX_ENTRIES = 1 << (VALUE_BITS - 1)
_FIRST_SLOTS = 8

Change = tuple[int, int, int]
"""(old value, new value, number of consecutive entries with this change)."""


def block_keys(hashes: bytes) -> list[int]:
    """Return the 64-bit keys (first 8 bytes) of packed 16-byte hashes. A trailing partial hash is ignored."""
    keys: list[int] = np.frombuffer(hashes, dtype="<u8", count=2 * (len(hashes) // HASH_BYTES))[::2].tolist()
    return keys


class KeyTable:
    """Key -> value. Inlined look-ups read its shards' ``words`` (0: free) and slot ``masks``. Not thread-safe."""

    def __init__(self, max_entries: int) -> None:
        self.max_entries = max_entries
        self.num_entries = 0
        self.num_refused = 0
        shards = 64
        while shards * 4096 < max_entries:
            shards *= 2
        self.shard_mask = shards - 1
        self.words = [_new_words(_FIRST_SLOTS) for _ in range(shards)]
        self.masks = [_mask_of(_FIRST_SLOTS)] * shards
        self._used = [0] * shards

    @property
    def size_bytes(self) -> int:
        """Bytes of the arrays and their headers."""
        slots = sum(mask + 1 for mask in self.masks)
        return 8 * slots + 200 * len(self.words)

    def get(self, key: int) -> int:
        """Return the value of ``key``, or 0 when it is absent."""
        shard = key & self.shard_mask
        words, mask = self.words[shard], self.masks[shard]
        tag = key >> VALUE_BITS
        slot = tag & mask
        while (word := words[slot]) and word >> VALUE_BITS != tag:
            slot = (slot + 1) & mask
        return word & VALUE_MASK

    def update(
        self, keys: list[int], step: Callable[[int], int], max_entries: int | None = None
    ) -> tuple[list[Change], int]:
        """Replace each key's value v (0: absent) by the function ``step(v)`` (0: remove), and return the changes.

        Return also the XOR of the changed keys' words (see ``block_word``). Refuse new keys beyond ``max_entries``.
        """
        limit = self.max_entries if max_entries is None else max_entries
        shard_mask = self.shard_mask
        numbers: dict[int, int] = {}
        changes: list[Change] = []
        run_old = run_new = run = xor = 0
        words_of, mask_of = self.words, self.masks
        last = new = -1
        for key in keys:
            shard = key & shard_mask
            words, mask = words_of[shard], mask_of[shard]
            tag = key >> VALUE_BITS
            slot = tag & mask
            while (word := words[slot]) and word >> VALUE_BITS != tag:
                slot = (slot + 1) & mask
            old = word & VALUE_MASK
            if old != last:  # neighbours mostly have the same value
                last, new = old, numbers.get(old, -1)
                if new < 0:
                    new = numbers[old] = step(old)
            if new == old:
                continue
            if old == 0:
                if self.num_entries >= limit:
                    self.num_refused += 1
                    continue
                self.num_entries += 1
                self._used[shard] += 1
                words[slot] = tag << VALUE_BITS | new
                if 4 * self._used[shard] > 3 * mask:
                    self._rehash(shard, None)
            elif new == 0:
                self.num_entries -= 1
                self._remove(shard, slot)
            else:
                words[slot] = tag << VALUE_BITS | new
            xor ^= tag * (key & VALUE_MASK)
            if old == run_old and new == run_new:
                run += 1
            else:
                if run:
                    changes.append((run_old, run_new, run))
                run_old, run_new, run = old, new, 1
        if run:
            changes.append((run_old, run_new, run))
        return changes, xor

    def rebuild(self, shard: int, step: Callable[[int], int]) -> list[Change]:
        """Replace every value of one shard by ``step(value)``, drop values that become 0, and shrink the shard."""
        counts = self._rehash(shard, step)
        self.num_entries -= sum(count for _, new, count in counts if new == 0)
        return counts

    def _remove(self, shard: int, slot: int) -> None:
        """Free a slot, and move back later entries that its occupation had displaced."""
        words, mask = self.words[shard], self.masks[shard]
        self._used[shard] -= 1
        free = slot
        while word := words[slot := (slot + 1) & mask]:
            if (slot - (word >> VALUE_BITS)) & mask >= (slot - free) & mask:
                words[free] = word
                free = slot
        words[free] = 0

    def _rehash(self, shard: int, step: Callable[[int], int] | None) -> list[Change]:
        """Move a shard's entries into an array of the right size, with values mapped through ``step``."""
        numbers: dict[int, int] = {}
        counts: dict[int, int] = {}
        kept: list[int] = []
        for word in self.words[shard]:
            value = word & VALUE_MASK
            if not value:
                continue
            if step is not None:
                counts[value] = counts.get(value, 0) + 1
                new = numbers.get(value, -1)
                if new < 0:
                    new = numbers[value] = step(value)
                if not new:
                    continue
                word += new - value
            kept.append(word)
        slots = _FIRST_SLOTS
        while slots * 5 < len(kept) * 8:  # at most 5/8 full, so that it does not grow again soon
            slots *= 2
        words, mask = _new_words(slots), _mask_of(slots)
        for word in kept:
            slot = word >> VALUE_BITS & mask
            while words[slot]:
                slot = (slot + 1) & mask
            words[slot] = word
        self.words[shard], self.masks[shard] = words, mask
        self._used[shard] = len(kept)
        return [(value, numbers[value], count) for value, count in counts.items()]


def _new_words(slots: int) -> array[int]:
    return array("Q", bytes(8 * slots))


@cache
def _mask_of(slots: int) -> int:
    """Return the slot mask. All shards of a size share one object, so that it stays in the CPU's cache."""
    return slots - 1
