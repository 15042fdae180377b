"""What the cache of segments knows of one text, and what is put into it afterwards. Tokenizes nothing itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from router.protocol.block_hash import TokenArray
from serve_app.tokenization.public_tokens import PublicTokens
from serve_app.tokenization.segment_cache import ChainLink, SegmentCache


def key_prefix(*fields: bytes) -> bytes:
    """Return what a cache's key begins with: a text that follows can say nothing that one of the fields says."""
    return b"".join(len(field).to_bytes(4, "little") + field for field in fields)


@dataclass(slots=True)
class Lookup:
    """One UTF-8 text cut into segments and what the cache knows of each; None where it knows nothing."""

    root: bytes
    public_root: bytes
    public: PublicTokens
    raw: bytes
    ends: list[int]
    chain_keys: list[bytes] = field(default_factory=list)
    ids_keys: list[bytes] = field(default_factory=list)
    ids: list[TokenArray | None] = field(default_factory=list)
    hashes: list[bytes | None] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)

    def segment(self, index: int) -> bytes:
        """Return a segment's text."""
        return self.raw[self.ends[index - 1] if index else 0 : self.ends[index]]

    @property
    def missing_bytes(self) -> int:
        """Bytes of text whose ids are not known."""
        return sum(len(self.segment(index)) for index in self.missing)

    def fill_hashes(
        self, known: list[TokenArray], start: int, hash_from: Callable[[bytearray, int], bytes]
    ) -> list[int]:
        """Hash the blocks of segments that have no hashes yet; return the indices of those segments.

        ``known``: all segments' ids. ``start``: tokens before the first. Segment i holds the hashes of the blocks
        completed in it.
        """
        filled = [index for index, hashes in enumerate(self.hashes) if hashes is None]
        if not filled:
            return filled
        chain = bytearray()
        end = start
        for index, segment_ids in enumerate(known):
            end += len(segment_ids)
            hashes = self.hashes[index]
            if hashes is None:
                hashes = self.hashes[index] = hash_from(chain, end)
            chain += hashes
        return filled

    def remember(self, cache: SegmentCache, known: list[TokenArray], new_hashes: list[int]) -> None:
        """Put what was missing into the cache: ids, and hashes of the segments ``new_hashes``."""
        with cache.lock:
            for index in reversed(self.missing):
                cache.put(self.ids_keys[index], known[index])
            for index in reversed(new_hashes):
                hashes = self.hashes[index]
                assert hashes is not None
                cache.put(self.chain_keys[index], ChainLink(self.ids_keys[index], hashes))
