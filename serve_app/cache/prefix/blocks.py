"""The blocks of a pool.

Their ids with reference counts (``BlockPool``), and the index of computed ones (``BlockIndex``).

Invariant: free + idle (only in the cache) + used = total. A look-up compares a block's contents, not only its hash. Not
thread-safe, except ``held`` and ``count_held``, which any thread may call for a hint.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from router.protocol.block_hash import HASH_BYTES, PrefixScope, TokenArray, block_word, count_leading
from router.protocol.samples import faded
from serve_app.cache.eviction import Standing


class PoolExhausted(Exception):
    """More blocks were requested than are free."""


class BlockPool:
    """Block ids 0 to ``num_blocks`` - 1. All operations are O(1) per block."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        self.total_blocks = num_blocks
        self._references = [0] * num_blocks
        # A stack with ascending pops, so that a prompt's blocks tend to be adjacent in memory and KV reads are views.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: set[int] = set()

    @property
    def free_blocks(self) -> int:
        """The number of free blocks."""
        return len(self._free)

    @property
    def idle_blocks(self) -> int:
        """The number of blocks held only by the prefix cache."""
        return len(self._idle)

    @property
    def used_blocks(self) -> int:
        """The number of blocks held by at least one sequence."""
        return len(self._references) - len(self._free) - len(self._idle)

    def references(self, block: int) -> int:
        """Return the number of sequences that hold ``block``."""
        return self._references[block]

    def is_idle(self, block: int) -> bool:
        """Return whether only the prefix cache holds ``block``."""
        return block in self._idle

    def take(self, count: int) -> list[int]:
        """Take ``count`` free blocks with one reference each. Raises PoolExhausted, and takes none, if too few."""
        if count > len(self._free):
            raise PoolExhausted(f"{count} blocks asked for, {len(self._free)} free")
        if count == 0:
            return []
        taken = self._free[: -count - 1 : -1]
        del self._free[-count:]
        for block in taken:
            self._references[block] = 1
        return taken

    def retain(self, block: int) -> bool:
        """Add a reference to a block that is idle or in use, and return whether it was idle."""
        was_idle = self._references[block] == 0
        if was_idle:
            self._idle.remove(block)
        self._references[block] += 1
        return was_idle

    def release(self, block: int, *, keep: bool) -> bool:
        """Drop a reference, and return whether it was the last. The block is then idle (``keep``) or free."""
        left = self._references[block] - 1
        if left < 0:
            raise ValueError(f"block {block} is not in use")
        self._references[block] = left
        if left:
            return False
        if keep:
            self._idle.add(block)
        else:
            self._free.append(block)
        return True

    def free_idle(self, block: int) -> None:
        """Turn an idle block into a free one. Raises KeyError if it is not idle."""
        self._idle.remove(block)
        self._free.append(block)


@dataclass(slots=True)
class CachedBlock:
    """One indexed block and its parent (None: the root). ``released_at``: the tick when it last became idle.

    ``last_child``: the block that was indexed last under it, which may be gone.
    """

    block_hash: bytes
    block: int
    parent: int | None
    token_bytes: bytes
    scope: PrefixScope
    tenant: str
    children: int = 0
    last_child: int = -1
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
        last = expected = scope.at(0)
        for i in range(limit):
            if i == scope.public_blocks:
                last = expected = scope.private
            entry = self._by_hash.get(chain[HASH_BYTES * i : HASH_BYTES * (i + 1)])  # ``hash_at``, without a call
            if entry is None or entry.parent != parent or entry.token_bytes != raw[step * i : step * (i + 1)]:
                break
            if entry.scope is not last:
                if entry.scope != expected:
                    break
                last = entry.scope
            parent = entry.block
            matched.append(parent)
        return matched

    def add(self, entry: CachedBlock) -> None:
        """Index a new block, with a new hash, under an indexed parent."""
        self._by_hash[entry.block_hash] = self._by_block[entry.block] = entry
        self.xor ^= block_word(entry.block_hash)
        if entry.parent is not None:
            parent = self._by_block[entry.parent]
            parent.children, parent.last_child = parent.children + 1, entry.block

    def line_through(self, block_hash: bytes) -> list[int]:
        """Return the blocks from the root to one, and those that continue it as long as nothing else does."""
        entry = last = self._by_hash.get(block_hash)
        line: list[int] = []
        while entry is not None:
            line.append(entry.block)
            entry = None if entry.parent is None else self._by_block[entry.parent]
        line.reverse()
        while last is not None and last.children == 1:
            child = self._by_block.get(last.last_child)
            last = child if child is not None and child.parent == last.block else None
            line += [last.block] if last is not None else []
        return line

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
