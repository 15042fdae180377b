"""What of the engine's contract vLLM has no counterpart of: prefixes handed over or kept.

A request that asks for it is refused with a sentence; the settings that would are refused at the start.
"""

from __future__ import annotations

from serve_app.cache.prefix.hot_prefixes import HashedTokens, HotPrefixes, SavedPrefix
from serve_app.cache.prefix.pins import PinOutcome
from serve_app.engine.protocol import CacheRoom, EngineRequest


class NoTransfer:
    """The part of ``protocol.Engine`` that hands prefixes over and keeps them, for an engine that does neither."""

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
