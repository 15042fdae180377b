"""What of the engine's contract vLLM has no counterpart of: KV that comes, goes, or is kept.

A request that asks for it is refused with a sentence; the settings that would are refused at the start.
"""

from __future__ import annotations

from router.protocol.block_hash import PrefixScope, TokenArray
from serve_app.cache.kv_chain import KvChain, TransferError
from serve_app.cache.prefix.hot_prefixes import HashedTokens, HotPrefixes, SavedPrefix
from serve_app.cache.prefix.pins import PinOutcome
from serve_app.engine.protocol import CacheRoom, EngineRequest


class NoTransfer:
    """The part of ``protocol.Engine`` that moves KV, for an engine that moves none."""

    def export_prefix(
        self,
        scope: PrefixScope,
        token_ids: TokenArray,
        block_hashes: bytes,
        first: int = 0,
        most_blocks: int | None = None,
        *,
        demote: bool = False,
    ) -> KvChain | None:
        """Return None: KV does not leave vLLM without ``kv_pull``."""
        return None

    def import_part(
        self, part: KvChain, scope: PrefixScope, token_ids: TokenArray, block_hashes: bytes, first: int, tenant: str
    ) -> int:
        """Raise TransferError: KV does not enter vLLM."""
        raise TransferError("engine: vllm takes no KV from elsewhere without kv_pull")

    def hot_prefixes(self) -> HotPrefixes:
        """Return nothing: what vLLM holds cannot be handed over."""
        return HotPrefixes()

    def cache_room(self) -> CacheRoom:
        """Return none."""
        return CacheRoom(0, b"")

    def keep_save(self, saved: SavedPrefix, prefix: HashedTokens) -> PinOutcome | None:
        """Return None: vLLM pins nothing."""
        return None


def refuse_unmapped(request: EngineRequest) -> None:
    """Raise ValueError for what vLLM has no counterpart of."""
    if request.scope.public_blocks:
        raise ValueError("public prompts are not available with engine=vllm")
    if not request.store_kv:
        raise ValueError("with engine=vllm every request's KV stays in the cache; leave store_kv out")
