"""What the tokenizer remembers: token ids by segment of text, block hashes by conversation so far; LRU in bytes.

Whoever makes the keys decides who shares what. Callers hold ``lock``, once around all calls of a look-up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from threading import Lock

from router.protocol.block_hash import TokenArray

IDS_ENTRY_BYTES = 300
"""Charged for an entry of token ids besides the ids: key, array object, entry object, table slot (CPython 3.11)."""
CHAIN_ENTRY_BYTES = 230
"""The same for an entry of block hashes, which has no array and shares its second key."""


@dataclass(frozen=True, slots=True)
class ChainLink:
    """One segment of one conversation: where its ids are, and the packed hashes of the blocks completed in it."""

    ids_key: bytes
    block_hashes: bytes


@dataclass(frozen=True, slots=True)
class SegmentCacheStats:
    """``bytes``: charged now, at most ``max_bytes``. ``hits`` and ``misses`` count looked-up segments."""

    bytes: int
    max_bytes: int
    entries: int
    hits: int
    misses: int


class SegmentCache:
    """Two maps under one byte bound and one order of use; the least recently used entry of either goes first."""

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 0:
            raise ValueError(f"cache_bytes must not be negative, but is {capacity_bytes}")
        self.lock = Lock()
        self._capacity_bytes = capacity_bytes
        self._bytes = 0
        self._entries: OrderedDict[bytes, TokenArray | ChainLink] = OrderedDict()
        self._hits = 0
        self._misses = 0

    def link(self, key: bytes) -> ChainLink | None:
        """Return what is known of a conversation up to a segment, without touching its place in the order."""
        entry = self._entries.get(key)
        return entry if type(entry) is ChainLink else None

    def ids(self, key: bytes) -> TokenArray | None:
        """Return the token ids of a segment, without touching their place in the order."""
        entry = self._entries.get(key)
        return None if entry is None or type(entry) is ChainLink else entry  # type: ignore[return-value]

    def count(self, hits: int, misses: int) -> None:
        """Add to the counters."""
        self._hits += hits
        self._misses += misses

    def touch(self, keys: Iterable[bytes]) -> None:
        """Make ``keys`` the most recently used, the last one most of all; unknown keys are ignored."""
        entries = self._entries
        move = entries.move_to_end
        for key in keys:
            if key in entries:
                move(key)

    def put(self, key: bytes, entry: TokenArray | ChainLink) -> None:
        """Remember ``entry`` and evict until the bound holds; an entry over the bound is not kept."""
        charge = _charge(entry)
        if charge > self._capacity_bytes:
            return
        self._bytes += charge - _charge(self._entries.pop(key, None))
        self._entries[key] = entry
        while self._bytes > self._capacity_bytes:
            _, evicted = self._entries.popitem(last=False)
            self._bytes -= _charge(evicted)

    def stats(self) -> SegmentCacheStats:
        """Return size and counters."""
        return SegmentCacheStats(self._bytes, self._capacity_bytes, len(self._entries), self._hits, self._misses)


def _charge(entry: TokenArray | ChainLink | None) -> int:
    if entry is None:
        return 0
    if isinstance(entry, ChainLink):
        return CHAIN_ENTRY_BYTES + len(entry.block_hashes)
    return IDS_ENTRY_BYTES + entry.nbytes
