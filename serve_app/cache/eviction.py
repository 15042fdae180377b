"""Which of a tenant's blocks goes first: the one place that says so, for the pool and for the tiers below it.

Owns the order, ``rank``, and the queues that keep it. ``Accounts`` chooses the tenant; the caches see that a block in
use stays, and a parent in the pool as long as its child. Not thread-safe.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, TypeVar

K = TypeVar("K")


class Standing(IntEnum):
    """What goes before anything else of its tenant, and what after all of it, whatever the order between."""

    DEMOTED = 0
    """Another replica took it over."""
    ORDINARY = 1
    PINNED = 2
    """A pin's, written to disk, where it may be evicted."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is known of a block when it comes into a queue. ``used``: the tick of its last use, which rises.

    ``size``: bytes, or 1 for a block of the pool. ``hits``: requests that matched a prefix that ends here, where the
    cache counts them.
    """

    used: int
    standing: Standing = Standing.ORDINARY
    size: int = 1
    hits: float = 0.0


def rank(candidate: Candidate) -> float:
    """Return a block's place among those of its standing: the lowest goes first. Least recently used."""
    return candidate.used


def eviction_key(candidate: Candidate) -> tuple[int, float]:
    """Return what blocks of one tenant are sorted by, the first to go first."""
    return candidate.standing, rank(candidate)


class EvictionQueue(Generic[K]):
    """One tenant's blocks that can go. Every call is O(log n) or better, amortized."""

    __slots__ = ("_entries", "_heap", "_numbers")

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float], int, K]] = []
        self._numbers: dict[K, int] = {}
        self._entries = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def put(self, key: K, candidate: Candidate) -> None:
        """Take a block in, or change its place."""
        self._entries += 1
        self._numbers[key] = self._entries
        heapq.heappush(self._heap, (eviction_key(candidate), self._entries, key))
        if len(self._heap) > 2 * len(self._numbers) + 64:
            self._heap = [entry for entry in self._heap if self._numbers.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def discard(self, key: K) -> None:
        """Take a block out, if it is there."""
        self._numbers.pop(key, None)

    def first(self) -> K:
        """Return the block that goes first, which stays. Raises IndexError when there is none."""
        while self._numbers.get(self._heap[0][2]) != self._heap[0][1]:
            heapq.heappop(self._heap)
        return self._heap[0][2]
