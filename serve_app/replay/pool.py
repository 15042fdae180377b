"""One replica's KV pool over segments: runs of blocks that all requests of a file have together.

Every request ends where a segment ends, so a pool of segments hits and evicts exactly what one of blocks would: least
recently used first, the end of a prompt before its beginning. Only the tail of a segment may be gone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from serve_app.replay.setup import CacheTier


class Holders:
    """Which replicas hold which segment: what routers know of the pools. A replica is a bit of a number."""

    __slots__ = ("some", "whole")

    def __init__(self) -> None:
        self.whole: dict[int, int] = {}
        """The bits of replicas that hold all of a segment."""
        self.some: dict[int, dict[int, int]] = {}
        """By segment: blocks by the bit of a replica that holds a part."""


@dataclass(eq=False)
class TierStore:
    """Evicted segments in one tier, in order of their eviction: ``blocks`` by segment."""

    tier: CacheTier
    capacity_blocks: int
    held: OrderedDict[int, int] = field(default_factory=OrderedDict)
    used_blocks: int = 0

    def put(self, segment: int, blocks: int) -> None:
        """Keep the first ``blocks`` of a segment; the longest unused ones go."""
        before = self.held.pop(segment, 0)
        kept = max(before, blocks)
        self.used_blocks += kept - before
        self.held[segment] = kept
        while self.used_blocks > self.capacity_blocks and self.held:
            _, gone = self.held.popitem(last=False)
            self.used_blocks -= gone

    def read(self, segment: int) -> int:
        """Return the blocks that are held of a segment."""
        blocks = self.held.get(segment, 0)
        if blocks:
            self.held.move_to_end(segment)
        return blocks


class SegmentPool:
    """A pool of ``capacity`` blocks. ``sizes``: blocks by segment; ``bit``: of this replica in ``holders``."""

    __slots__ = ("_sizes", "bit", "capacity", "free", "held", "holders", "idle", "idle_blocks", "refs", "tiers")

    def __init__(
        self, capacity: int, sizes: Sequence[int], bit: int, holders: Holders, tiers: Sequence[TierStore] = ()
    ) -> None:
        self.capacity = self.free = capacity
        self.bit, self.holders, self.tiers = bit, holders, tiers
        self.held: dict[int, int] = {}
        self.refs: dict[int, int] = {}
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.idle_blocks = 0
        self._sizes = sizes

    @property
    def available(self) -> int:
        """Blocks that can be had: free and evictable ones."""
        return self.free + self.idle_blocks

    def match(self, path: Sequence[int]) -> tuple[int, int]:
        """Return how many leading segments are held, a part of the last included, and their blocks."""
        held, sizes, blocks, count = self.held, self._sizes, 0, 0
        for segment in path:
            here = held.get(segment, 0)
            if not here:
                break
            blocks += here
            count += 1
            if here < sizes[segment]:
                break
        return count, blocks

    def loadable(self, path: Sequence[int], count: int, blocks: int) -> tuple[int, float]:
        """Return the blocks that tiers have after a match (see ``match``), and the seconds of each of their tokens."""
        if not self.tiers:
            return 0, 0.0
        found, cost = 0, 0.0
        sizes, held = self._sizes, self.held
        first = count - 1 if count and held[path[count - 1]] < sizes[path[count - 1]] else count
        for segment in path[first:]:
            have = held.get(segment, 0)
            most, per_s = max(
                ((store.read(segment), store.tier.tokens_per_s) for store in self.tiers), default=(0, 0.0)
            )
            if most <= have:
                break
            found += most - have
            cost += (most - have) / per_s
            if most < sizes[segment]:
                break
        return found, cost / found if found else 0.0

    def fits(self, path: Sequence[int], count: int, blocks: int) -> bool:
        """Return whether so many blocks can be had while the first ``count`` segments stay."""
        if blocks <= self.free:
            return True
        refs, held = self.refs, self.held
        return blocks <= self.available - sum(held[segment] for segment in path[:count] if segment not in refs)

    def acquire(self, path: Sequence[int], count: int) -> None:
        """Keep the first ``count`` segments from being evicted."""
        refs, idle = self.refs, self.idle
        for segment in path[:count]:
            before = refs.get(segment, 0)
            refs[segment] = before + 1
            if not before:
                del idle[segment]
                self.idle_blocks -= self.held[segment]

    def take(self, blocks: int) -> bool:
        """Take blocks for a sequence, evicting as needed; return False, and take none, if there are too few."""
        if blocks > self.free:
            if blocks > self.free + self.idle_blocks:
                return False
            self._evict(blocks - self.free)
        self.free -= blocks
        return True

    def give(self, blocks: int) -> None:
        """Return blocks that ``take`` gave and nothing holds."""
        self.free += blocks

    def publish(self, path: Sequence[int], count: int) -> tuple[int, int]:
        """Hold a whole prompt, of which ``count`` segments were matched; return the blocks it used of those taken.

        Segments that another sequence has published meanwhile use none. The second number: the prompt's own blocks.
        """
        held, refs, sizes, holders, bit = self.held, self.refs, self._sizes, self.holders, self.bit
        used = total = 0
        for place, segment in enumerate(path):
            here, whole = held.get(segment, 0), sizes[segment]
            total += whole
            if here < whole:
                used += whole - here
                if segment in self.idle:  # its tail was evicted while nobody used it
                    self.idle_blocks += whole - here
                held[segment] = whole
                holders.whole[segment] = holders.whole.get(segment, 0) | bit
                if here and (parts := holders.some.get(segment)) is not None:
                    parts.pop(bit, None)
                    if not parts:
                        del holders.some[segment]
            if place >= count:
                before = refs.get(segment, 0)
                refs[segment] = before + 1
                if not before and here:
                    del self.idle[segment]
                    self.idle_blocks -= whole
        return used, total

    def grow(self, segment: int, blocks: int) -> int:
        """Hold the first ``blocks`` of a segment as just used, from blocks taken; return how many that used."""
        here = self.held.get(segment, 0)
        if blocks <= here:
            return 0
        self.held[segment] = blocks
        if not self.refs.get(segment):
            self.idle_blocks += blocks - here
            self.idle[segment] = None
            self.idle.move_to_end(segment)
        self._tell(segment, blocks)
        return blocks - here

    def release(self, path: Sequence[int]) -> None:
        """Let a prompt's segments be evicted, its end first."""
        refs, idle, held = self.refs, self.idle, self.held
        for segment in reversed(path):
            left = refs[segment] - 1
            if left:
                refs[segment] = left
            else:
                del refs[segment]
                idle[segment] = None
                self.idle_blocks += held[segment]

    def clear(self) -> None:
        """Forget everything: the replica is gone."""
        for segment in list(self.held):
            self._tell(segment, 0)
        for each in (self.held, self.refs, self.idle):
            each.clear()
        self.free, self.idle_blocks = self.capacity, 0

    def _tell(self, segment: int, blocks: int) -> None:
        holders, bit = self.holders, self.bit
        if blocks == self._sizes[segment]:
            holders.whole[segment] = holders.whole.get(segment, 0) | bit
        elif (whole := holders.whole.get(segment, 0)) & bit:
            if whole == bit:
                del holders.whole[segment]
            else:
                holders.whole[segment] = whole & ~bit
        parts = holders.some.get(segment)
        if 0 < blocks < self._sizes[segment]:
            if parts is None:
                parts = holders.some[segment] = {}
            parts[bit] = blocks
        elif parts is not None:
            parts.pop(bit, None)
            if not parts:
                del holders.some[segment]

    def _evict(self, blocks: int) -> None:
        held, idle = self.held, self.idle
        while blocks > 0:
            segment = next(iter(idle))
            here = held[segment]
            gone = min(here, blocks)
            for store in self.tiers:
                store.put(segment, here)
            blocks -= gone
            self.free += gone
            self.idle_blocks -= gone
            if gone == here:
                del held[segment], idle[segment]
                self._tell(segment, 0)
            else:
                held[segment] = here - gone
                self._tell(segment, here - gone)
