"""Parts of texts that tokenize separately to the same ids (``Segmenter``), and the cache of them (``SegmentCache``).

A cached part of a conversation has its token ids and block hashes, and which are public. Callers hold its ``lock``.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from threading import Lock
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

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


MIN_SEGMENT_BYTES = 1024
"""A segment ends at the first added token after this many bytes, so that short turns share one segment."""

# NFC shrinks a text to a third at most (three Hangul letters of three bytes become one); one more for safety.
_SHRINKS = {"NFC": 4, "NFD": 1, "Prepend": 1, "Replace": 1, "ByteLevel": 1}
_SPLITTERS = frozenset(("ByteLevel", "Split", "Digits", "Metaspace", "Punctuation"))


class Segmenter:
    """Cuts text before added tokens. ``exact`` is False if cuts would change the ids. Then no text is cut.

    A tokenizer first splits raw text at added tokens with ``normalized=False``, and tokenizes each part separately.
    Exceptions: tokens that absorb adjacent text (``lstrip``, ``rstrip``, ``single_word``), special tokens that are not
    split, and a pre-tokenizer that treats the first part differently (Metaspace "first").
    Source: AddedVocabulary.extract_and_normalize and Metaspace in the tokenizers crate.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = [token for token in tokenizer.get_added_tokens_decoder().values() if token.content]
        cutting = [token for token in added if not token.normalized]
        contents = sorted((token.content for token in cutting), key=lambda content: (-len(content), content))
        self._pattern = re.compile(b"|".join(re.escape(content.encode()) for content in contents))
        self.exact = (
            bool(contents)
            and not any(token.lstrip or token.rstrip or token.single_word for token in added)
            and not tokenizer.encode_special_tokens
            and not _treats_first_part_otherwise(component_state(tokenizer.pre_tokenizer))
            and _agrees(tokenizer, contents[:8])
        )

    def cut(self, raw: bytes) -> list[int]:
        """Return the byte offsets of the segment ends of a UTF-8 text. A growing conversation keeps earlier ones."""
        ends: list[int] = []
        earliest = MIN_SEGMENT_BYTES
        for match in self._pattern.finditer(raw) if self.exact else ():
            if match.start() >= earliest:
                ends.append(match.start())
                earliest = match.start() + MIN_SEGMENT_BYTES
        if raw:
            ends.append(len(raw))
        return ends


def component_state(component: Any) -> Any:
    """Return a tokenizer component (decoder, pre-tokenizer, ...) as parsed JSON; None for None."""
    return None if component is None else json.loads(component.__getstate__())


def _treats_first_part_otherwise(state: Any) -> bool:
    if isinstance(state, list):
        return any(map(_treats_first_part_otherwise, state))
    if not isinstance(state, dict):
        return False
    if state.get("type") == "Metaspace" and state.get("prepend_scheme") == "first":
        return True
    return any(map(_treats_first_part_otherwise, state.values()))


def _agrees(tokenizer: Tokenizer, contents: list[str]) -> bool:
    """Test cuts on a few texts, as a guard against tokenizer rules unknown to this module."""

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    return all(
        ids(before + content + after) == ids(before) + ids(content + after)
        for content in contents
        for before, after in (("a b", "c d"), (" a \n", " b \n"), ("x", ""), ("é ", "\n\ny"))
    )


def longest_token_chars(tokenizer: Tokenizer) -> int | None:
    """Return the maximum number of characters of one token, or None if no bound is known.

    A bound is known for byte-level BPE and BPE with byte fallback, if normalizer and pre-tokenizer drop no text.
    """
    model = component_state(tokenizer.model) or {}
    splitters = list(_parts(component_state(tokenizer.pre_tokenizer)))
    normalizers = list(_parts(component_state(tokenizer.normalizer)))
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    by_byte = any(part["type"] == "ByteLevel" for part in (*splitters, *normalizers))
    bounded = (
        model.get("type") == "BPE"
        and (model.get("byte_fallback") or (by_byte and all(letter in vocabulary for letter in ByteLevel.alphabet())))
        and not any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values())
        and all(part["type"] in _SPLITTERS and part.get("behavior") != "Removed" for part in splitters)
        and all(part["type"] in _SHRINKS and (part["type"] != "Replace" or _keeps_length(part)) for part in normalizers)
    )
    # A letter of a byte-level token is a byte, and every character has at least one byte.
    return prod(_SHRINKS[part["type"]] for part in normalizers) * max(map(len, vocabulary)) if bounded else None


def _keeps_length(replacement: dict[str, Any]) -> bool:
    replaced = replacement.get("pattern", {}).get("String", "")
    return bool(replaced) and len(replacement.get("content", "")) >= len(replaced)


def _parts(state: Any) -> Iterator[dict[str, Any]]:
    """Yield the components of a sequence, or the single component."""
    if not isinstance(state, dict):
        return
    if state.get("type") != "Sequence":
        yield state
        return
    for name in ("normalizers", "pretokenizers"):
        for part in state.get(name, ()):
            yield from _parts(part)
