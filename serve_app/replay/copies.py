"""KV that is copied when simulated replicas come and go: one that joins takes what is hot, one that leaves gives.

As pre-warm and hand-over do. Knows pools and segments, not replicas: callers say how many blocks may be copied.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from math import inf

from router.protocol.samples import faded
from serve_app.replay.pool import SegmentPool


def heats(pool: SegmentPool, now_s: float) -> dict[int, float]:
    """Return the heat of each segment that a pool holds (see ``serve_app.cache.prefix.hot_prefixes``)."""
    hits: dict[int, float] = {}
    used_s: dict[int, float] = {}
    for segment in reversed(pool.held):  # children before their parents
        at_s = pool.used_s[segment]
        hits[segment] = hits.get(segment, 0.0) + faded(pool.hits.get(segment, 0.0), at_s, now_s)
        used_s[segment] = max(at_s, used_s.get(segment, -inf))
        parent = pool.parents[segment]
        if parent is not None:
            hits[parent] = hits.get(parent, 0.0) + hits[segment]
            used_s[parent] = max(used_s.get(parent, -inf), used_s[segment])
    return {segment: count + faded(1.0, used_s[segment], now_s) for segment, count in hits.items()}


def hottest(pools: Sequence[SegmentPool], now_s: float) -> list[tuple[float, int, SegmentPool]]:
    """Return heats, segments and the pools that hold them, the hottest first, and a parent before its child."""
    found = []
    for pool in pools:
        heat = heats(pool, now_s)
        found += [(-heat[segment], place, segment, pool) for place, segment in enumerate(pool.held)]
    found.sort(key=lambda each: each[:2])
    return [(-colder, segment, pool) for colder, _, segment, pool in found]


def warm(pool: SegmentPool, others: Sequence[SegmentPool], most_blocks: int, now_s: float) -> int:
    """Copy what is hottest in the others into free blocks; return how many."""
    left = min(most_blocks, pool.free)
    copied = 0
    for _, segment, source in hottest(others, now_s):
        blocks, parent, here = source.held[segment], source.parents[segment], pool.held.get(segment, 0)
        more = min(blocks - here, left)
        if more > 0 and (parent is None or pool.held.get(parent, 0) >= source.held[parent]):
            left -= more
            copied += _copy(pool, segment, here + more, parent, now_s)
    return copied


class _Receiver:
    """A pool that takes what another one leaves, in free blocks and in those of colder segments."""

    def __init__(self, pool: SegmentPool, now_s: float) -> None:
        self.pool = pool
        heat = heats(pool, now_s)
        idle = sorted((heat[segment], pool.held[segment]) for segment in pool.idle)
        self._heats = [each for each, _ in idle]
        self._blocks = [0, *accumulate(blocks for _, blocks in idle)]
        self._free = pool.free

    def room(self, heat: float) -> int:
        """Return the blocks for a segment so hot."""
        return self._free + self._blocks[bisect_left(self._heats, heat)]

    def take(self, segment: int, blocks: int, parent: int | None, now_s: float) -> int:
        """Copy a segment; return the blocks copied."""
        copied = _copy(self.pool, segment, blocks, parent, now_s)
        self._free -= copied
        return copied


def hand_over(leaving: SegmentPool, others: Sequence[SegmentPool], most_blocks: int, now_s: float) -> int:
    """Copy what no other pool holds, the hottest first, to those with most of the prefix; return how many blocks."""
    receivers = [_Receiver(pool, now_s) for pool in others]
    copied = 0
    for heat, segment, _ in hottest([leaving], now_s):
        blocks, parent = leaving.held[segment], leaving.parents[segment]
        here = [each.pool.held.get(segment, 0) for each in receivers]
        if max(here, default=blocks) >= blocks:
            continue
        able = [
            each
            for each in receivers
            if parent is None or each.pool.held.get(parent, 0) >= leaving.held[parent]
            if each.room(heat) >= blocks and blocks <= each.pool.available
        ]
        if not able or blocks > most_blocks - copied:
            continue
        chosen = max(able, key=lambda each: (each.pool.held.get(segment, 0), each.room(heat)))
        copied += chosen.take(segment, blocks, parent, now_s)
    return copied


def _copy(pool: SegmentPool, segment: int, blocks: int, parent: int | None, now_s: float) -> int:
    """Hold a segment as just used, and all before it, too: they are evicted after it."""
    path = [segment] if segment in pool.held else []
    at = parent
    while at is not None:
        path.insert(0, at)
        at = pool.parents[at]
    pool.acquire(path, len(path))  # lest they go for their own end
    taken = pool.take(blocks - pool.held.get(segment, 0))
    grown = pool.grow(segment, blocks, parent, now_s) if taken else 0
    pool.release(path)
    return grown
