"""Cuts texts into parts that tokenize separately to the same ids, and bounds the text length of one token."""

import json
import re
from collections.abc import Iterator
from math import prod
from typing import Any

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

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
