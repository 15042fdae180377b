"""Which of a request's blocks enter vLLM's map, under whose root, and on whose account. Runs in vLLM's core.

vLLM salts a chain's first block. Here that is the public root, where blocks are public, and the first private block has
the tenant's in its hash too, so that what follows it is the tenant's alone. The events say so as vLLM says a salt.
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
"""vLLM's: a request -> the hashes of its whole blocks that have none yet."""


class ScopedBlocks:
    """Stands between vLLM's managers and the map of their ``pool``. ``hash_name``: of the hash that names blocks."""

    def __init__(self, pool: Any, queue: TenantFreeQueue, hash_name: str) -> None:
        self._pool = pool
        self._queue = queue
        self._hash = get_hash_fn_by_name(hash_name)
        self._enter = pool.cache_full_blocks
        pool.cache_full_blocks = self.cache_full_blocks

    def begin(self, request: Any) -> None:
        """Hash what is private of a request under its tenant's root, before anything is looked up or stored of it."""
        tokens, salt = public_part(request)
        if not tokens or request._block_hasher is None:
            return
        self._queue.shares.touch(PUBLIC)  # it has a share as long as anybody reads it
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
        """Do as vLLM's pool, unless the request stores nothing; what is public leaves its tenant's account."""
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
            if len(keys) == num_full_blocks - num_cached_blocks:  # else the group keeps only some: no directory's
                keys[public - num_cached_blocks] = (*(keys[public - num_cached_blocks] or ()), salt)

    def _hashes(self, own: Hasher, public: int, salt: str, request: Any) -> list[Any]:
        """Return the hashes that a request lacks, as vLLM's ``own`` hasher but for the first private block's."""
        size = self._pool.hash_block_size
        start, end = public * size, (public + 1) * size
        if len(request.block_hashes) == public and request.num_tokens >= end:
            keys, _ = generate_block_hash_extra_keys(request, start, end, 0)
            private = (*(keys or ()), ("cache_salt", salt))
            ids = request.all_token_ids[start:end]
            request.block_hashes.append(hash_block_tokens(self._hash, request.block_hashes[-1], ids, private))
        return own(request)
