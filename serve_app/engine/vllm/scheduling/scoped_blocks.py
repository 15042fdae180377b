"""The root, and the tenant to charge, of each block that enters vLLM's map. Runs in vLLM's core.

vLLM salts a chain's first block. Here this salt is the public root if blocks are public. The first private block then
has the tenant's root in its hash too, so that all later blocks are the tenant's alone; the events report it as a salt.
"""

from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from typing import Any

from serve_app.cache.prefix.quota import PUBLIC
from serve_app.engine.vllm.scheduling.tenant import public_part, stores_kv

Hasher = Callable[[Any], list[Any]]
"""vLLM's hasher: a request -> the hashes of its whole blocks that have none yet."""


class ScopedBlocks:
    """Stands between vLLM's managers and the map of their ``pool``. ``queue``: its accounts, None without any."""

    def __init__(self, pool: Any, queue: Any = None) -> None:
        self._pool = pool
        self._queue = queue
        self._enter = pool.cache_full_blocks
        pool.cache_full_blocks = self.cache_full_blocks

    def begin(self, request: Any) -> None:
        """Hash a request's private blocks under its tenant's root, before any look-up or store."""
        tokens, salt = public_part(request)
        if not tokens or request._block_hasher is None:
            return
        if self._queue is not None:
            self._queue.shares.touch(PUBLIC)  # it has a share while any request reads it
        public = tokens // self._pool.hash_block_size
        request.block_hashes.clear()
        request._block_hasher = partial(_private_hashes, request._block_hasher, public, bytes.fromhex(salt))
        request.update_block_hashes()

    def cache_full_blocks(
        self,
        request: Any,
        blocks: Sequence[Any],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        *more: Any,
        **named: Any,
    ) -> None:
        """Do as vLLM's pool, unless the request stores nothing; public blocks leave the tenant's account."""
        if not stores_kv(request):
            return
        before = len(self._pool.kv_event_queue)
        self._enter(request, blocks, num_cached_blocks, num_full_blocks, block_size, *more, **named)
        tokens, salt = public_part(request)
        if not tokens:
            return
        public = tokens // block_size
        if self._queue is not None:
            self._queue.hand_over(blocks[num_cached_blocks : min(public, num_full_blocks)], PUBLIC)
        if len(self._pool.kv_event_queue) > before and num_cached_blocks <= public < num_full_blocks:
            keys = self._pool.kv_event_queue[-1].extra_keys
            if keys and len(keys) == num_full_blocks - num_cached_blocks:  # a group of states keeps only some
                own = (salt, tokens % block_size) if tokens % block_size else (salt,)  # it may begin in a block
                keys[public - num_cached_blocks] = (*(keys[public - num_cached_blocks] or ()), *own)


def _private_hashes(own: Hasher, public: int, root: bytes, request: Any) -> list[Any]:
    """Return the hashes that a request lacks, by vLLM's ``own`` hasher: the first private one also covers the root."""
    hashes, before = request.block_hashes, len(request.block_hashes)
    if before > public:
        return own(request)
    shared = own(request)[: public - before] if before < public else []
    if before + len(shared) < public:
        return shared
    hashes += shared
    parent, hashes[-1] = hashes[-1], sha256(hashes[-1] + root).digest()
    try:
        return shared + own(request)
    finally:
        hashes[-1] = parent
        del hashes[before:]
