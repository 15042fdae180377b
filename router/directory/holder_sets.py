"""The holders of blocks: a slot (one bit) for each tier of a replica, and interned sets that many blocks share."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from sys import getsizeof

from router.directory.key_table import Change


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
        found = self._ids.get(mask)
        if found is not None:
            return found
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
