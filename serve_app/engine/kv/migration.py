"""What another replica asks when a cache moves: what is hot here, what would fit here, and to keep a save.

Owns no decision: it looks at the cache between two steps and reckons outside of them. Called from any thread, not from
the loop's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from serve_app.cache.prefix.block_index import CachedBlock
from serve_app.cache.prefix.hot_prefixes import (
    HashedTokens,
    HotPrefixes,
    SavedPrefix,
    idle_heats,
    list_hot,
)
from serve_app.cache.prefix.pins import PinOutcome
from serve_app.cache.prefix.prefix_cache import PrefixCache
from serve_app.engine.kv.prompt_saves import PromptSaves
from serve_app.engine.kv.transfer import OnLoop
from serve_app.engine.protocol import CacheRoom
from serve_app.engine.scheduling.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class CacheMigration:
    """One engine's answers."""

    cache: PrefixCache
    scheduler: Scheduler
    saves: PromptSaves
    on_loop: OnLoop
    clock: Callable[[], float]

    def hot_prefixes(self) -> HotPrefixes:
        """Return all that the pool holds, saves and the hottest first."""
        entries, pins = self.on_loop(lambda: (list(self.cache.index), self.cache.pins.soonest_first()))
        return list_hot(entries, pins, self.clock())

    def cache_room(self) -> CacheRoom:
        """Return how much of the pool is free, and how hot the rest is that could be evicted."""

        def look() -> tuple[int, list[CachedBlock], list[int]]:
            pool, entries = self.cache.pool, list(self.cache.index)
            free = pool.free_blocks - self.scheduler.reserved_blocks
            return free, entries, [entry.block for entry in entries if pool.is_idle(entry.block)]

        if not self.cache.enabled:
            return CacheRoom(0, b"")
        free, entries, idle = self.on_loop(look)
        # What is promised to running sequences comes out of the coldest idle blocks once nothing is free.
        return CacheRoom(max(0, free), idle_heats(entries, idle, self.clock())[4 * max(0, -free) :])

    def take_over_pin(self, saved: SavedPrefix, prefix: HashedTokens) -> PinOutcome | None:
        """Pin a prefix that another replica kept, with what is left of its time; None where it is not all here."""

        def take_over() -> PinOutcome | None:
            ids = np.append(prefix.token_ids, np.int32(0))  # no last token here that has to be computed
            blocks = self.cache.match(prefix.scope, ids, prefix.chain)
            if len(blocks) * self.cache.block_size < len(prefix.token_ids):
                return None
            return self.saves.take_over(saved, blocks)

        if not self.cache.enabled or (saved.ttl_s or math.inf) <= saved.unread_s:
            return None
        return self.on_loop(take_over)
