"""The index of computed KV blocks: hash -> block, and look-ups that compare a block's contents.

Not thread-safe, except ``held`` and ``count_held``, which any thread may call for a hint.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from router.protocol.block_hash import HASH_BYTES, PrefixScope, TokenArray, block_word, count_leading
from router.protocol.heat import faded
from serve_app.cache.eviction import Standing


@dataclass(slots=True)
class CachedBlock:
    """One indexed block and its parent (None: the root). ``released_at``: the tick when it last became idle."""

    block_hash: bytes
    block: int
    parent: int | None
    token_bytes: bytes
    scope: PrefixScope
    tenant: str
    children: int = 0
    released_at: int = 0
    standing: Standing = Standing.ORDINARY
    prefix_digest: bytes = b""
    """Set by the tiers when they need it (see ``serve_app.cache.prefix_digest``)."""
    used_s: float = 0.0
    """The time when it was indexed, or when the last request matched a prefix that ends here."""
    hits: float = 0.0
    """Requests that matched a prefix that ends here, as of ``used_s``. Older requests count less."""
    reused: bool = False
    """Whether a request matched a prefix that ends here, or at a descendant that is evicted by now."""

    def hit(self, now_s: float) -> None:
        """Count a request that matched a prefix that ends here."""
        self.hits = self.hits_at(now_s) + 1.0
        self.reused = True
        self.used_s = now_s

    def hits_at(self, now_s: float) -> float:
        """Return the hits, decayed to the given time."""
        return faded(self.hits, self.used_s, now_s)

    def equals(self, parent: int | None, token_bytes: bytes, scope: PrefixScope) -> bool:
        """Return whether tokens, parent and scope are equal. An equal hash alone is no proof."""
        return self.parent == parent and self.token_bytes == token_bytes and self.scope == scope


class BlockIndex:
    """Entries by hash and by block. A parent is always indexed too. ``xor``: of the hashes' words (``block_word``)."""

    def __init__(self, block_size: int) -> None:
        self.xor = 0
        self._step = 4 * block_size
        self._by_hash: dict[bytes, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}

    def __len__(self) -> int:
        return len(self._by_hash)

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    def __iter__(self) -> Iterator[CachedBlock]:
        """Entries in the order in which they were added."""
        return iter(self._by_block.values())

    def of_block(self, block: int) -> CachedBlock | None:
        """Return the entry of a block."""
        return self._by_block.get(block)

    def of_hash(self, block_hash: bytes) -> CachedBlock | None:
        """Return the entry of a hash (unverified)."""
        return self._by_hash.get(block_hash)

    def held(self, block_hash: bytes) -> bool:
        """Return whether a block with that hash is indexed (unverified)."""
        return block_hash in self._by_hash

    def count_held(self, chain: bytes, blocks: int) -> int:
        """Return how many of a chain's first ``blocks`` are indexed (unverified; O(log n) because parents are kept)."""
        return count_leading(chain, blocks, self.held)

    def match(self, scope: PrefixScope, token_ids: TokenArray, chain: bytes, limit: int) -> list[int]:
        """Return the longest prefix, of ``limit`` blocks at most, with equal tokens, parents and scopes."""
        matched: list[int] = []
        parent: int | None = None
        raw = np.ascontiguousarray(token_ids, dtype="<i4").tobytes()
        step = self._step
        # Scopes are compared by value once and then by identity, because a long prefix shares one object.
        known = wanted = scope.at(0)
        for i in range(limit):
            if i == scope.public_blocks:
                known = wanted = scope.private
            entry = self._by_hash.get(chain[HASH_BYTES * i : HASH_BYTES * (i + 1)])  # ``hash_at``, without a call
            if entry is None or entry.parent != parent or entry.token_bytes != raw[step * i : step * (i + 1)]:
                break
            if entry.scope is not known:
                if entry.scope != wanted:
                    break
                known = entry.scope
            parent = entry.block
            matched.append(parent)
        return matched

    def add(self, entry: CachedBlock) -> None:
        """Index a new block, with a new hash, under an indexed parent."""
        self._by_hash[entry.block_hash] = self._by_block[entry.block] = entry
        self.xor ^= block_word(entry.block_hash)
        if entry.parent is not None:
            self._by_block[entry.parent].children += 1

    def remove(self, entry: CachedBlock) -> CachedBlock | None:
        """Remove an entry without children, and return its parent's entry."""
        del self._by_block[entry.block], self._by_hash[entry.block_hash]
        self.xor ^= block_word(entry.block_hash)
        if entry.parent is None:
            return None
        parent = self._by_block[entry.parent]
        parent.children -= 1
        return parent

    def clear(self) -> None:
        """Remove all entries."""
        self._by_hash.clear()
        self._by_block.clear()
        self.xor = 0
