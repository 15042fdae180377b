"""The root, and the tenant to charge, of each block that enters vLLM's map. Runs in vLLM's core.

vLLM salts a chain's first block. Here this salt is the public root if blocks are public. The first private block then
has the tenant's root in its hash too, so that all later blocks are the tenant's alone; the events report it as a salt.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, hash_block_tokens

from serve_app.cache.prefix.quota import PUBLIC
from serve_app.engine.vllm.scheduling.free_queue import TenantFreeQueue
from serve_app.engine.vllm.scheduling.tenant import public_part, stores_kv

Hasher = Callable[[Any], list[Any]]
"""vLLM's hasher: a request -> the hashes of its whole blocks that have none yet."""


class ScopedBlocks:
    """Stands between vLLM's managers and the map of their ``pool``. ``hash_name``: vLLM's name of the block hash."""

    def __init__(self, pool: Any, queue: TenantFreeQueue, hash_name: str) -> None:
        self._pool = pool
        self._queue = queue
        self._hash = get_hash_fn_by_name(hash_name)
        self._enter = pool.cache_full_blocks
        pool.cache_full_blocks = self.cache_full_blocks

    def begin(self, request: Any) -> None:
        """Hash a request's private blocks under its tenant's root, before any look-up or store."""
        tokens, salt = public_part(request)
        if not tokens or request._block_hasher is None:
            return
        self._queue.shares.touch(PUBLIC)  # it has a share while any request reads it
        public = tokens // self._pool.hash_block_size
        del request.block_hashes[public:]
        request._block_hasher = partial(self._hashes, request._block_hasher, public, salt)
        request.update_block_hashes()

    def cache_full_blocks(
        self,
        request: Any,
        blocks: Sequence[Any],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: list[bool] | None = None,
    ) -> None:
        """Do as vLLM's pool, unless the request stores nothing; public blocks leave the tenant's account."""
        if not stores_kv(request):
            return
        self._enter(
            request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id, block_mask=block_mask
        )
        tokens, salt = public_part(request)
        if not tokens:
            return
        public = tokens // block_size
        self._queue.hand_over(blocks[num_cached_blocks : min(public, num_full_blocks)], PUBLIC)
        if self._pool.enable_kv_cache_events and num_cached_blocks <= public < num_full_blocks:
            keys = self._pool.kv_event_queue[-1].extra_keys
            if keys and len(keys) == num_full_blocks - num_cached_blocks:  # a group of states keeps only some
                own = (salt, tokens % block_size) if tokens % block_size else (salt,)  # it may begin in a block
                keys[public - num_cached_blocks] = (*(keys[public - num_cached_blocks] or ()), *own)

    def _hashes(self, own: Hasher, public: int, salt: str, request: Any) -> list[Any]:
        """Return the hashes that a request lacks, like vLLM's ``own`` hasher except for the first private block."""
        size = self._pool.hash_block_size
        start, end = public * size, (public + 1) * size
        if len(request.block_hashes) == public and request.num_tokens >= end:
            keys, _ = generate_block_hash_extra_keys(request, start, end, 0)
            private = (*(keys or ()), ("cache_salt", salt))
            ids = request.all_token_ids[start:end]
            request.block_hashes.append(hash_block_tokens(self._hash, request.block_hashes[-1], ids, private))
        return own(request)
