"""Export and import of cached prefixes between engines, with reports of hot prefixes and free space.

Called from any thread but the loop's. Cache and pool are touched on the loop, a bounded number of bytes per visit.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np

from router.protocol.block_hash import HASH_BYTES
from serve_app.cache.kv_chain import KvChain, Row, make_header, verify_part
from serve_app.cache.prefix.blocks import CachedBlock
from serve_app.cache.prefix.hot_prefixes import HashedTokens, HotPrefixes, SavedPrefix, idle_heats, list_hot
from serve_app.cache.prefix.pins import PinOutcome
from serve_app.cache.prefix.prefix_cache import PrefixCache
from serve_app.engine.kv.prompt_pins import PromptPins
from serve_app.engine.kv.tier_loader import TierLoader, install_blocks
from serve_app.engine.protocol import CacheRoom, Clock
from serve_app.engine.scheduling.scheduler import Scheduler
from serve_app.engine.step import Runner

STEP_BYTES = 32 * 1024 * 1024
"""Upper limit of the bytes copied between two steps, so that sequences keep decoding."""

T = TypeVar("T", covariant=True)


class OnLoop(Protocol):
    """Runs work on the engine's loop and returns its result."""

    def __call__(self, work: Callable[[], T], /) -> T:
        """Run ``work`` between two steps."""


@dataclass(eq=False)
class PrefixTransfer:
    """Export and import of one engine's KV."""

    cache: PrefixCache
    runner: Runner
    scheduler: Scheduler
    tiers: TierLoader
    pins: PromptPins
    on_loop: OnLoop
    clock: Clock

    @property
    def _step_blocks(self) -> int:
        return max(1, STEP_BYTES // self.runner.block_bytes)

    def export_prefix(
        self, prefix: HashedTokens, first: int = 0, most_blocks: int | None = None, *, demote: bool = False
    ) -> KvChain | None:
        """Return the blocks of the longest part of ``prefix`` in pool and host memory, from block ``first`` on.

        Returns at most ``most_blocks`` blocks, or None if there are none. Pool blocks cannot be evicted meanwhile. With
        ``demote`` they are the first to be evicted afterwards, unless another prefix or sequence uses them.
        """
        size = self.cache.block_size
        scope, ids = prefix.scope, np.ascontiguousarray(prefix.token_ids, dtype=np.int32)
        if most_blocks is not None:
            ids = ids[: (first + most_blocks) * size]
        chain = prefix.chain[: len(ids) // size * HASH_BYTES]
        tokens = HashedTokens(scope, ids, chain)
        payload = np.empty((max(len(chain) // HASH_BYTES - first, 0), self.runner.kv_format.block_bytes), np.uint8)
        blocks: list[int] | None = None
        copied = 0

        def copy() -> bool:
            """Copy one step's worth; return whether more is left. The last visit releases the pool's blocks."""
            nonlocal blocks, copied
            if blocks is None:
                blocks = self._match(tokens)
                self.cache.acquire(blocks, read=demote)  # a pull for a request counts as a read
            rows = list(payload[copied : copied + self._step_blocks])
            at, end = first + copied, first + copied + len(rows)
            cached = blocks[at:end]
            if cached:
                self.runner.read_blocks(cached, rows[: len(cached)])
            below: Sequence[Row] = ()
            if len(cached) < len(rows):
                below = self.tiers.rows(tokens, blocks, at + len(cached), end)
                for row, source in zip(rows[len(cached) :], below, strict=False):
                    row[...] = source
            copied += len(cached) + len(below)
            if len(cached) + len(below) == len(rows) and copied < len(payload):
                return True
            self.cache.release(blocks)
            if demote and copied:
                self.cache.demote(blocks)
            blocks = []
            return False

        try:
            while self.on_loop(copy):
                pass
        except BaseException:
            self.on_loop(lambda: self.cache.release(blocks or []))
            raise
        if not copied:
            return None
        end, payload = first + copied, payload[:copied]
        cached_ids, hashes = ids[: end * size], chain[: end * HASH_BYTES]
        return KvChain(make_header(self.runner.kv_format, scope, cached_ids, hashes, payload, first), payload)

    def import_part(self, part: KvChain, prefix: HashedTokens, first: int) -> int:
        """Publish the blocks of ``part``, which continue ``prefix`` from ``first`` on (``verify_part``), as they fit.

        Returns how many leading blocks are held then. New ones are charged to the prefix's tenant. Imports nothing if
        blocks before ``first`` are missing by now. Raises a TransferError, importing nothing.
        """
        if not self.cache.enabled:
            return 0
        verify_part(part, self.runner.kv_format, prefix.scope, prefix.token_ids, prefix.chain, first)
        end = first + part.header.blocks
        ids = prefix.token_ids[: end * self.cache.block_size]
        covered = replace(prefix, token_ids=ids, chain=prefix.chain[: end * HASH_BYTES])
        while True:
            cached, new = self.on_loop(lambda: self._take(part, covered, first))
            if not new or cached >= end:
                return cached

    def hot_prefixes(self) -> HotPrefixes:
        """Return all prefixes in the pool, saves and the hottest first."""
        entries, pins = self.on_loop(lambda: (list(self.cache.index), self.cache.pins.soonest_first()))
        return list_hot(entries, pins, self.clock())

    def cache_room(self) -> CacheRoom:
        """Return the free part of the pool, and the heats of the blocks that could be evicted."""

        def look() -> tuple[int, list[CachedBlock], list[int]]:
            pool, entries = self.cache.pool, list(self.cache.index)
            free = pool.free_blocks - self.scheduler.reserved_blocks
            return free, entries, [entry.block for entry in entries if pool.is_idle(entry.block)]

        if not self.cache.enabled:
            return CacheRoom(0, b"")
        free, entries, idle = self.on_loop(look)
        # Blocks reserved for running sequences come out of the coldest idle ones once nothing is free.
        return CacheRoom(max(0, free), idle_heats(entries, idle, self.clock())[4 * max(0, -free) :])

    def take_over_pin(self, saved: SavedPrefix, prefix: HashedTokens) -> PinOutcome | None:
        """Pin a prefix that another replica kept, for its remaining time; None if part of it is missing here."""

        def take_over() -> PinOutcome | None:
            blocks = self._match(prefix)
            if len(blocks) * self.cache.block_size < len(prefix.token_ids):
                return None
            return self.pins.take_over(saved, blocks)

        if not self.cache.enabled or (saved.ttl_s or math.inf) <= saved.unread_s:
            return None
        return self.on_loop(take_over)

    def _match(self, tokens: HashedTokens) -> list[int]:
        """Match whole blocks, the last one too: no last token has to be computed here, unlike for a prompt."""
        return self.cache.match(tokens.scope, np.append(tokens.token_ids, np.int32(0)), tokens.chain)

    def _take(self, part: KvChain, covered: HashedTokens, first: int) -> tuple[int, int]:
        """Load one step's worth of blocks; return (blocks held from the chain's start, new ones)."""
        cache = self.cache
        matched = self._match(covered)
        cached = len(matched)
        idle_hits = sum(1 for block in matched if cache.pool.is_idle(block))
        room = cache.available_blocks - idle_hits - self.scheduler.reserved_blocks
        count = min(first + part.header.blocks - cached, self._step_blocks, room)
        if count <= 0 or cached < first:
            return cached, 0
        rows = list(part.payload[cached - first : cached - first + count])
        new = install_blocks(cache, self.runner, covered, matched, count, lambda: rows)
        return cached + new, new
