"""KV from elsewhere into the pool, published exactly as if it had been computed.

Owns the order of steps in which no reservation is broken and no half-written block can be hit. Runs in the engine's
loop, between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from serve_app.cache.kv_chain import Row
from serve_app.cache.prefix.hot_prefixes import HashedTokens
from serve_app.cache.prefix.prefix_cache import PrefixCache
from serve_app.engine.step import Runner

Rows = Callable[[], Sequence[Row]]
"""Asked once blocks are allocated (an eviction may have moved what was to be read): the rows still there, in order."""


def install_blocks(
    cache: PrefixCache, runner: Runner, tokens: HashedTokens, matched: Sequence[int], count: int, rows: Rows
) -> int:
    """Load up to ``count`` blocks after the ``matched`` ones of a chain; return how many a match finds more.

    The caller has made sure that ``count`` blocks are available besides those matched and reserved. What is loaded
    is idle afterwards, and the last of its line to be evicted.
    """
    cache.acquire(matched, read=False)
    fresh: list[int] = []
    try:
        fresh = cache.allocate(count, tokens.tenant)
        loaded = rows()
        runner.write_blocks(fresh[: len(loaded)], loaded)
        blocks = [*matched, *fresh]
        first, last = len(matched), len(matched) + len(loaded)
        done = cache.publish(tokens.scope, tokens.token_ids, tokens.chain, blocks, first, last)
        fresh = blocks[len(matched) :]
        return done - len(matched)
    finally:
        cache.release([*matched, *fresh])
