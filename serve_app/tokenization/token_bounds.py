"""How much text one token can stand for: a text that is longer than all of a model's tokens needs no tokenizing."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from serve_app.tokenization.segmenter import component_state

_NFC_SHRINKS = 4
"""Composing at most thirds a text (three Hangul letters of three bytes become one); one more for safety."""
_SHRINKS = {"NFC": _NFC_SHRINKS, "NFD": 1, "Prepend": 1, "Replace": 1, "ByteLevel": 1}
_SPLITTERS = frozenset(("ByteLevel", "Split", "Digits", "Metaspace", "Punctuation"))


def longest_token_chars(tokenizer: Tokenizer) -> int | None:
    """Return the most characters that one token can stand for; None where nothing is known to bound it.

    Known are byte-level BPE and BPE with byte fallback whose normalizer and pre-tokenizer drop nothing. Everywhere else
    a token may stand for any length: an unknown word, a swallowed neighbourhood, text that is left out.
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
    # A letter of a byte-level token is a byte, and no character has fewer.
    return prod(_SHRINKS[part["type"]] for part in normalizers) * max(map(len, vocabulary)) if bounded else None


def _keeps_length(replacement: dict[str, Any]) -> bool:
    replaced = replacement.get("pattern", {}).get("String", "")
    return bool(replaced) and len(replacement.get("content", "")) >= len(replaced)


def _parts(state: Any) -> Iterator[dict[str, Any]]:
    """Yield the components of a sequence, or the one there is."""
    if not isinstance(state, dict):
        return
    if state.get("type") != "Sequence":
        yield state
        return
    for name in ("normalizers", "pretokenizers"):
        for part in state.get(name, ()):
            yield from _parts(part)
