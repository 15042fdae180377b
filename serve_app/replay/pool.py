"""One replica's KV pool over segments: runs of blocks that all requests of a file have together.

Every request ends where a segment ends, so a pool of segments hits and evicts exactly what one of blocks would: least
recently used first, the end of a prompt before its beginning. Only the tail of a segment may be gone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from router.protocol.samples import faded
from serve_app.replay.setup import CacheTier


class Holders:
    """Which replicas hold which segment: what routers know of the pools. A replica is a bit of a number."""

    __slots__ = ("rests", "some", "whole")

    def __init__(self) -> None:
        self.rests = 0
        """Answers' ends that no prompt continues: segments -1, -2 and so on, which nobody looks for."""
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

    __slots__ = (
        "_children", "_demoted", "_sizes", "bit", "capacity", "free", "held", "hits", "holders", "idle", "idle_blocks",
        "parents", "refs", "tiers", "used_s",
    )  # fmt: skip

    def __init__(
        self, capacity: int, sizes: Sequence[int], bit: int, holders: Holders, tiers: Sequence[TierStore] = ()
    ) -> None:
        self.capacity = self.free = capacity
        self.bit, self.holders, self.tiers = bit, holders, tiers
        self.held: dict[int, int] = {}
        self.refs: dict[int, int] = {}
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.idle_blocks = 0
        self.parents: dict[int, int | None] = {}
        """By held segment: the one before it."""
        self.used_s: dict[int, float] = {}
        """By held segment: when it was new, or a request matched a prefix that ends there."""
        self.hits: dict[int, float] = {}
        """Those requests, as of ``used_s``; older ones count less."""
        self._demoted: dict[int, None] = {}
        """Idle segments that go before all others, in their order."""
        self._children: dict[int | None, int] = {}
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
                self._demoted.pop(segment, None)
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

    def hit(self, segment: int, now_s: float) -> None:
        """Count a request that matched a prefix that ends with a held segment."""
        self.hits[segment] = 1.0 + faded(self.hits.get(segment, 0.0), self.used_s[segment], now_s)
        self.used_s[segment] = now_s

    def publish(self, path: Sequence[int], count: int, now_s: float) -> tuple[int, int]:
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
                if not here:
                    self._descend(segment, path[place - 1] if place else None, now_s)
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
                    self._demoted.pop(segment, None)
                    self.idle_blocks -= whole
        return used, total

    def grow(self, segment: int, blocks: int, parent: int | None, now_s: float) -> int:
        """Hold the first ``blocks`` of a segment as just used, from blocks taken; return how many that used."""
        here = self.held.get(segment, 0)
        if blocks <= here:
            return 0
        if not here:
            self._descend(segment, parent, now_s)
        self.held[segment] = blocks
        if not self.refs.get(segment):
            self.idle_blocks += blocks - here
            self.idle[segment] = None
            self.idle.move_to_end(segment)
            self._demoted.pop(segment, None)
        self._tell(segment, blocks)
        return blocks - here

    def keep(self, blocks: int, parent: int | None, now_s: float) -> None:
        """Hold blocks taken as just used, the end of an answer that no prompt continues: it fills the pool as others.

        Call it before ``release``: the end of a sequence goes before its beginning.
        """
        if blocks > 0:
            self.holders.rests += 1
            rest = -self.holders.rests
            self._descend(rest, parent, now_s)
            self.held[rest] = blocks
            self.idle[rest] = None
            self.idle_blocks += blocks

    def demote(self, path: Sequence[int], blocks: int) -> None:
        """Evict the unused, unshared tail of a prompt's first ``blocks`` first: another replica has taken it over."""
        tail: list[int] = []
        end = 0
        for segment in path:
            here = self.held.get(segment, 0)
            end += here
            if not here or end > blocks:
                return  # what is taken over has more behind it here
            tail.append(segment)
            if end == blocks or here < self._sizes[segment]:
                break
        kept = next(
            (
                place
                for place in range(len(tail), 0, -1)
                if tail[place - 1] not in self.idle or self._children.get(tail[place - 1], 0) > (place < len(tail))
            ),
            0,
        )
        for segment in reversed(tail[kept:]):
            self._demoted.pop(segment, None)
            self._demoted[segment] = None

    def _descend(self, segment: int, parent: int | None, now_s: float) -> None:
        self.parents[segment], self.used_s[segment] = parent, now_s
        self._children[parent] = self._children.get(parent, 0) + 1

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

    def _ascend(self, segment: int) -> None:
        parent = self.parents.pop(segment)
        left = self._children.pop(parent) - 1
        if left:
            self._children[parent] = left

    def clear(self) -> None:
        """Forget everything: the replica is gone."""
        for segment in list(self.held):
            self._tell(segment, 0)
        for each in (
            self.held,
            self.refs,
            self.idle,
            self.parents,
            self._children,
            self._demoted,
            self.used_s,
            self.hits,
        ):
            each.clear()
        self.free, self.idle_blocks = self.capacity, 0

    def _tell(self, segment: int, blocks: int) -> None:
        if segment < 0:
            return
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
            segment = next(iter(self._demoted or idle))
            here = held[segment]
            gone = min(here, blocks)
            for store in self.tiers:
                store.put(segment, here)
            blocks -= gone
            self.free += gone
            self.idle_blocks -= gone
            if gone == here:
                del held[segment], idle[segment], self.used_s[segment]
                self.hits.pop(segment, None)
                self._demoted.pop(segment, None)
                self._ascend(segment)
                self._tell(segment, 0)
            else:
                held[segment] = here - gone
                self._tell(segment, here - gone)
