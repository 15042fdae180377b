"""Export and import of cached prefixes between engines.

Owns the order of pinning, copying and publishing. Knows nothing of how a chain travels. Called from any thread; what
touches cache and pool runs on the engine's loop, a bounded number of bytes between two steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import numpy as np

from router.block_hash import HASH_BYTES, PrefixScope, TokenArray
from serve_app.cache.prefix_cache import PrefixCache
from serve_app.cache.transfer import KvChain, make_header, verify_chain
from serve_app.engine.install import install_blocks
from serve_app.engine.protocol import ImportedPrefix
from serve_app.engine.scheduler import Scheduler
from serve_app.engine.step import Runner

STEP_BYTES = 32 * 1024 * 1024
"""Copied between two steps at most, so that sequences keep decoding."""

T = TypeVar("T", covariant=True)


class OnLoop(Protocol):
    """Runs work on the engine's loop and returns what it returns."""

    def __call__(self, work: Callable[[], T], /) -> T:
        """Run ``work`` between two steps."""


class PrefixTransfer:
    """One engine's way in and out for KV."""

    def __init__(self, cache: PrefixCache, runner: Runner, scheduler: Scheduler, on_loop: OnLoop) -> None:
        self._cache = cache
        self._runner = runner
        self._scheduler = scheduler
        self._on_loop = on_loop
        self._step_blocks = max(1, STEP_BYTES // runner.block_bytes)

    def export_prefix(self, scope: PrefixScope, root: bytes, token_ids: TokenArray) -> KvChain | None:
        """Return the longest prefix of ``token_ids`` in the pool; its blocks cannot be evicted meanwhile."""
        size = self._cache.block_size
        ids = np.ascontiguousarray(token_ids, dtype=np.int32)
        chain = self._cache.chain(root, ids)
        blocks = self._on_loop(lambda: self._hold(scope, ids, chain))
        if not blocks:
            return None
        payload = np.empty((len(blocks), self._runner.kv_format.block_bytes), dtype=np.uint8)
        try:
            for start in range(0, len(blocks), self._step_blocks):
                part = slice(start, start + self._step_blocks)

                def read(part: slice = part) -> None:
                    self._runner.read_blocks(blocks[part], list(payload[part]))

                self._on_loop(read)
        finally:
            self._on_loop(lambda: self._cache.release(blocks))
        held = ids[: len(blocks) * size]
        return KvChain(
            make_header(self._runner.kv_format, scope, held, chain[: len(blocks) * HASH_BYTES], payload), payload
        )

    def import_prefix(self, chain: KvChain, scope: PrefixScope, root: bytes, tenant: str = "default") -> ImportedPrefix:
        """Publish a chain's blocks as far as free and evictable room goes. Raises a TransferError, taking nothing.

        New blocks go on the account of ``tenant``.
        """
        cache = self._cache
        if not cache.enabled:
            return ImportedPrefix(0, 0)
        ids = verify_chain(chain, self._runner.kv_format, scope, root, lambda parent, ids, _: cache.chain(parent, ids))
        held, new = self._on_loop(lambda: self._take(chain, scope, ids, tenant))
        while held < chain.header.blocks:
            more_held, more = self._on_loop(lambda: self._take(chain, scope, ids, tenant))
            held, new = more_held, new + more
            if not more:
                break
        return ImportedPrefix(held, new)

    def _hold(self, scope: PrefixScope, ids: TokenArray, chain: bytes) -> list[int]:
        matched = self._match(scope, ids, chain)
        self._cache.acquire(matched)
        return matched

    def _match(self, scope: PrefixScope, ids: TokenArray, chain: bytes) -> list[int]:
        """Match whole blocks, the last one too: there is no prompt here whose last token has to be computed."""
        return self._cache.match(scope, np.append(ids, np.int32(0)), chain)

    def _take(self, chain: KvChain, scope: PrefixScope, ids: TokenArray, tenant: str) -> tuple[int, int]:
        """Load one step's worth of blocks; return (blocks held from the chain's start, new ones)."""
        cache, hashes = self._cache, chain.header.hashes
        matched = self._match(scope, ids, hashes)
        first = len(matched)
        idle_hits = sum(1 for block in matched if cache.pool.is_idle(block))
        room = cache.available_blocks - idle_hits - self._scheduler.promised_blocks
        count = min(chain.header.blocks - first, self._step_blocks, room)
        if count <= 0:
            return first, 0
        rows = list(chain.payload[first : first + count])
        new = install_blocks(cache, self._runner, scope, ids, hashes, matched, count, lambda: rows, tenant)
        return first + new, new
