"""A model of the rule of Ray's PrefixCacheAffinityRouter, over block ids instead of characters.

Owns the approximate tree that its detached actor keeps: who was ever sent which prefix, never evicted (its
default). Knows nothing of real caches. Source: ray 2.60,
ray/llm/_internal/serve/routing_policies/prefix_aware/{prefix_aware_router,prefix_tree}.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

MATCH_RATE_THRESHOLD = 0.1


class RayPrefixTree:
    """One tree for all routers of a deployment."""

    def __init__(self, replica_ids: Iterable[str]) -> None:
        self._tokens = dict.fromkeys(replica_ids, 0)
        self._holders: dict[bytes, set[str]] = {}

    def candidates(self, prefixes: Collection[bytes], prompt_tokens: int, block_size: int) -> Collection[str]:
        """Return the replicas of which the one with the shortest queue is taken.

        ``prefixes``: a hash for each leading block. Those that were sent the deepest known prefix; below the
        match rate, those that were sent the fewest distinct tokens. Imbalance is not looked at (default: infinite).
        """
        matched: Collection[str] = ()
        depth = 0
        for prefix in prefixes:
            holders = self._holders.get(prefix)
            if not holders:
                break
            matched, depth = holders, depth + 1
        if min(depth * block_size, prompt_tokens) < MATCH_RATE_THRESHOLD * prompt_tokens or not matched:
            smallest = min(self._tokens.values())
            return [name for name, tokens in self._tokens.items() if tokens == smallest]
        return matched

    def insert(self, replica_id: str, prefixes: Iterable[bytes], block_size: int) -> None:
        """Note that a replica was sent a prompt."""
        for prefix in prefixes:
            holders = self._holders.setdefault(prefix, set())
            if replica_id not in holders:
                holders.add(replica_id)
                self._tokens[replica_id] += block_size
