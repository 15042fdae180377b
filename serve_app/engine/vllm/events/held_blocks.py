"""What a pool holds by its events: each block's tokens, what it hangs under, and how much it is used.

Owns the look-ups that routers' hashes allow. Only who follows the events changes it; any thread may ask. Knows no hash
of vLLM's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from router.protocol.block_hash import HASH_BYTES, PrefixScope, block_word, hash_at
from serve_app.cache.prefix.block_index import HEAT_MEMORY_S, CachedBlock, count_leading
from serve_app.engine.protocol import Clock

OwnerOf = Callable[[bytes], tuple[PrefixScope, str] | None]
"""A root -> whose it is: the scope and a tenant of it. None: unknown."""


@dataclass(slots=True)
class HeldBlock:
    """``under``: the parent's hash, of a chain's first block the root. ``hits``, ``used_s``: as of ``CachedBlock``."""

    under: bytes
    token_bytes: bytes
    used_s: float
    hits: float = 0.0


class HeldBlocks:
    """Blocks by our hash, in the order in which they were stored. ``xor``: of the words of their hashes."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.xor = 0
        self._clock = clock
        self._blocks: dict[bytes, HeldBlock] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._blocks)

    def add(self, block_hash: bytes, under: bytes, token_bytes: bytes) -> None:
        """Take in a block that is not held."""
        self._blocks[block_hash] = HeldBlock(under, token_bytes, self._clock())
        self.xor ^= block_word(block_hash)

    def remove(self, block_hash: bytes) -> None:
        """Forget a block that is held."""
        del self._blocks[block_hash]
        self.xor ^= block_word(block_hash)

    def clear(self) -> None:
        """Forget everything."""
        self._blocks.clear()
        self.xor = 0

    def known(self, chain: bytes, most: int) -> int:
        """Return how many of a packed chain's first ``most`` blocks are held; a hint where a hole is among them."""
        return count_leading(chain, min(most, len(chain) // HASH_BYTES), self._blocks.__contains__)

    def hit(self, chain: bytes, most: int) -> int:
        """Do as ``known`` for a request that will use them, and count it: hot is what is used."""
        blocks = self.known(chain, most)
        held = self._blocks.get(hash_at(chain, blocks - 1)) if blocks else None
        if held is not None:
            now_s = self._clock()
            held.hits = held.hits * math.exp((held.used_s - now_s) / HEAT_MEMORY_S) + 1.0
            held.used_s = now_s
        return blocks

    def root_of(self, first_hash: bytes) -> bytes:
        """Return the root that a chain's first block hangs under; b"" where that is not held."""
        held = self._blocks.get(first_hash)
        return held.under if held is not None else b""

    def entries(self, owner_of: OwnerOf) -> list[CachedBlock]:
        """Return everything that begins under a root whose owner is known, parents first, numbered from 0."""
        numbers: dict[bytes, int] = {}
        entries: list[CachedBlock] = []
        for block_hash, held in list(self._blocks.items()):
            parent = numbers.get(held.under)
            owner = owner_of(held.under) if parent is None else (entries[parent].scope, entries[parent].tenant)
            if owner is not None:
                number = numbers[block_hash] = len(entries)
                entries.append(
                    CachedBlock(
                        block_hash, number, parent, held.token_bytes, *owner, used_s=held.used_s, hits=held.hits
                    )
                )
        return entries
