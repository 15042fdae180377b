"""Cached segments of conversations, with token ids and block hashes, and public tokens. Callers hold ``lock``."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from threading import Lock

import numpy as np

from router.protocol.block_hash import TokenArray, common_tokens

ENTRY_BYTES = 320
"""A segment's charge besides ids and hashes: key, array, entry and bytes objects, table slot (CPython 3.11)."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenizedSegment:
    """One segment of one conversation: its token ids, and the packed hashes of the blocks completed in it."""

    ids: TokenArray
    block_hashes: bytes

    @property
    def charge(self) -> int:
        """The charged size in bytes."""
        return ENTRY_BYTES + self.ids.nbytes + len(self.block_hashes)


@dataclass(frozen=True, slots=True)
class SegmentCacheStats:
    """``bytes``: charged now, at most ``max_bytes``. ``hits`` and ``misses`` count looked-up segments."""

    bytes: int
    max_bytes: int
    entries: int
    hits: int
    misses: int


class SegmentCache:
    """Segments by key within a byte limit. The least recently used is evicted first."""

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 0:
            raise ValueError(f"cache_bytes must not be negative, but is {capacity_bytes}")
        self.lock = Lock()
        self._capacity_bytes = capacity_bytes
        self._bytes = 0
        self._segments: OrderedDict[bytes, TokenizedSegment] = OrderedDict()
        self._hits = 0
        self._misses = 0

    def get(self, keys: list[bytes]) -> list[TokenizedSegment | None]:
        """Return one conversation's cached segments, and count hits and misses. Its beginning is evicted last."""
        segments = [self._segments.get(key) for key in keys]
        for key, segment in zip(reversed(keys), reversed(segments), strict=True):
            if segment is not None:
                self._segments.move_to_end(key)
        misses = segments.count(None)
        self._misses += misses
        self._hits += len(segments) - misses
        return segments

    def put(self, segments: Iterable[tuple[bytes, TokenizedSegment]]) -> None:
        """Add segments, with the last as most recent, and evict to the limit. A segment over the limit is not kept."""
        for key, segment in segments:
            if segment.charge > self._capacity_bytes:
                continue
            replaced = self._segments.pop(key, None)
            self._bytes += segment.charge - (replaced.charge if replaced is not None else 0)
            self._segments[key] = segment
            while self._bytes > self._capacity_bytes:
                self._bytes -= self._segments.popitem(last=False)[1].charge

    def stats(self) -> SegmentCacheStats:
        """Return size and counters."""
        return SegmentCacheStats(self._bytes, self._capacity_bytes, len(self._segments), self._hits, self._misses)


class PublicTokens:
    """Public prompts, to count a prompt's public tokens. Immutable. ``generation``: separates derived cache entries."""

    def __init__(self, prompts: Iterable[TokenArray] = (), generation: int = 0) -> None:
        self._prompts = [np.array(ids, dtype=np.int32) for ids in prompts]
        self.generation = generation

    def count(self, token_ids: TokenArray) -> int:
        """Return the number of public leading tokens. O(prompts), with at most a few hundred prompts."""
        public = 0
        for prompt in self._prompts:
            if public < min(len(prompt), len(token_ids)) and prompt[public] == token_ids[public]:
                public = max(public, common_tokens(token_ids, prompt))
        return public
