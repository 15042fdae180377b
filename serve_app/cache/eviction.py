"""The eviction order of a tenant's blocks, in the pool and in the tiers below it: least recently used first.

``prefix.quota.Accounts`` chooses the tenant. The caches keep blocks in use, and a parent as long as its child. Not
thread-safe.
"""

import heapq
from enum import IntEnum
from typing import Generic, TypeVar

K = TypeVar("K")


class Standing(IntEnum):
    """The eviction class of a block. All of a tenant's blocks of a lower class are evicted first."""

    DEMOTED = 0
    """Another replica has a copy."""
    ORDINARY = 1
    PINNED = 2
    """A pinned block's copy on disk, which may be evicted."""


class EvictionQueue(Generic[K]):
    """One tenant's evictable blocks. Every call is O(log n) or better, amortized."""

    __slots__ = ("_entries", "_heap", "_numbers")

    def __init__(self) -> None:
        self._heap: list[tuple[Standing, int, int, K]] = []
        self._numbers: dict[K, int] = {}
        self._entries = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def put(self, key: K, used: int, standing: Standing) -> None:
        """Add a block, or change its place. ``used``: the tick of its last use."""
        self._entries += 1
        self._numbers[key] = self._entries
        heapq.heappush(self._heap, (standing, used, self._entries, key))
        if len(self._heap) > 2 * len(self._numbers) + 64:
            self._heap = [entry for entry in self._heap if self._numbers.get(entry[3]) == entry[2]]
            heapq.heapify(self._heap)

    def discard(self, key: K) -> None:
        """Remove a block, if it is queued."""
        self._numbers.pop(key, None)

    def first(self) -> K:
        """Return the block to evict first, without removing it. Raises IndexError when there is none."""
        while self._numbers.get(self._heap[0][3]) != self._heap[0][2]:
            heapq.heappop(self._heap)
        return self._heap[0][3]
