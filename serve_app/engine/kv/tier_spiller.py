"""The engine's writes to the tiers: spills of evicted blocks, saves, and the ends of saves.

Called by the loop alone. From creation to ``close`` it is notified of every eviction and of every pin's end.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from serve_app.cache.prefix.block_index import CachedBlock
from serve_app.cache.prefix.prefix_cache import PrefixCache
from serve_app.cache.prefix_digest import TierBlock, next_digest, scope_digest
from serve_app.cache.tiers.tier import ReadRows
from serve_app.cache.tiers.tier_index import account_key
from serve_app.cache.tiers.tiers import Tiers
from serve_app.engine.step import Runner

CLOSE_S = 5.0
"""How long a stopping engine may write blocks that exist only in memory to tiers that keep them."""

CLOSE_BLOCKS = 64


@dataclass(eq=False)
class TierSpiller:
    """Spills and saves of one engine. ``clock``: the cache's."""

    cache: PrefixCache
    runner: Runner
    tiers: Tiers
    clock: Callable[[], float]
    _noted_s: float = -math.inf

    def __post_init__(self) -> None:
        if self.tiers.tiers:
            self.cache.on_evict = self.spill
            self.cache.pins.on_end = self.end_save

    def note_activity(self) -> None:
        """Give the tenants that the pool has seen since the last call their shares of the tiers."""
        if not self.tiers.indexes:
            return
        now_s = self.clock()
        self.tiers.seen(self.cache.quota.seen_since(self._noted_s))
        self._noted_s = now_s

    def spill(self, evicted: Sequence[CachedBlock]) -> None:
        """Spill blocks evicted from the pool, children first."""
        self.note_activity()
        self.tiers.spill(describe(self.cache, evicted), self._reader(evicted))

    def save(self, entries: Sequence[CachedBlock], ttl_s: float | None) -> bool:
        """Save pool blocks, children first, below for ``ttl_s`` (None: forever); False if some were not written."""
        until_s = math.inf if ttl_s is None else float(math.floor(time.time() + ttl_s))
        return self.tiers.save(describe(self.cache, entries), self._reader(entries), until_s)

    def end_save(self, blocks: Sequence[int]) -> None:
        """End a save: its blocks below the pool can be evicted like others."""
        entries = map(self.cache.index.of_block, blocks)
        self.tiers.end_save([entry.block_hash for entry in entries if entry is not None])

    def close(self) -> None:
        """Write pool and tiers to those that keep, if there are any; saves keep their remaining time."""
        cache, tiers = self.cache, self.tiers
        if not tiers.tiers:
            return
        cache.expire_pins()
        cache.pins.on_end = None
        deadline_s = time.monotonic() + CLOSE_S
        for pin in cache.pins.soonest_first():  # a block under several pins gets the last one's end
            tiers.wait_for_room(len(pin.blocks), deadline_s)
            entries = map(cache.index.of_block, reversed(pin.blocks))
            left_s = None if pin.expires_s == math.inf else pin.expires_s - self.clock()
            self.save([entry for entry in entries if entry is not None], left_s)
            cache.unpin(pin.key)
        while tiers.keeping and cache.pool.idle_blocks:
            tiers.wait_for_room(CLOSE_BLOCKS, deadline_s)
            cache.evict(min(CLOSE_BLOCKS, cache.pool.idle_blocks))
        cache.on_evict = None
        tiers.close(deadline_s)

    def _reader(self, entries: Sequence[CachedBlock]) -> ReadRows:
        return lambda wanted, rows: self.runner.read_blocks([entries[i].block for i in wanted], rows)


def describe(cache: PrefixCache, entries: Sequence[CachedBlock]) -> list[TierBlock]:
    """Return the tiers' descriptions of pool blocks; a parent is in ``entries`` or still in the cache."""
    batch = {entry.block: entry for entry in entries}
    described = []
    for entry in entries:
        unknown: list[CachedBlock] = []
        above: CachedBlock | None = entry
        while above is not None and not above.prefix_digest:
            unknown.append(above)
            parent = above.parent
            above = None if parent is None else batch.get(parent) or cache.index.of_block(parent)
        digest = above.prefix_digest if above is not None else b""
        for block in reversed(unknown):
            digest = block.prefix_digest = next_digest(digest, scope_digest(block.scope), block.token_bytes)
        scope, owner = entry.scope, account_key(entry.tenant)
        described.append(
            TierBlock(entry.block_hash, entry.prefix_digest, scope_digest(scope), scope.lora, entry.token_bytes, owner)
        )
    return described
