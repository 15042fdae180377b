"""Which of a tenant's blocks goes first, in the pool and in the tiers below it: ``rank`` is the one place that says so.

``Accounts`` chooses the tenant; the caches keep what is in use, and a parent as long as its child. Not thread-safe.
"""

import heapq
from enum import IntEnum
from typing import Generic, TypeVar

K = TypeVar("K")


class Standing(IntEnum):
    """What goes before anything else of its tenant, and what after all of it."""

    DEMOTED = 0
    """Another replica took it over."""
    ORDINARY = 1
    PINNED = 2
    """A pin's, written to disk, where it may be evicted."""


def rank(used: int, size: int, hits: float) -> float:
    """Return a block's place among those of its standing: the lowest goes first. Least recently used.

    ``used``: the tick of its last use, which rises; ``size``: bytes, or 1 in the pool; ``hits``: requests that matched
    a prefix that ends with the block, 0.0 in a tier.
    """
    return used


class EvictionQueue(Generic[K]):
    """One tenant's blocks that can go. Every call is O(log n) or better, amortized."""

    __slots__ = ("_entries", "_heap", "_numbers")

    def __init__(self) -> None:
        self._heap: list[tuple[Standing, float, int, K]] = []
        self._numbers: dict[K, int] = {}
        self._entries = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def put(self, key: K, used: int, standing: Standing, *, size: int = 1, hits: float = 0.0) -> None:
        """Take a block in, or change its place."""
        self._entries += 1
        self._numbers[key] = self._entries
        heapq.heappush(self._heap, (standing, rank(used, size, hits), self._entries, key))
        if len(self._heap) > 2 * len(self._numbers) + 64:
            self._heap = [entry for entry in self._heap if self._numbers.get(entry[3]) == entry[2]]
            heapq.heapify(self._heap)

    def discard(self, key: K) -> None:
        """Take a block out, if it is there."""
        self._numbers.pop(key, None)

    def first(self) -> K:
        """Return the block that goes first, which stays. Raises IndexError when there is none."""
        while self._numbers.get(self._heap[0][3]) != self._heap[0][2]:
            heapq.heappop(self._heap)
        return self._heap[0][3]
