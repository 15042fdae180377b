"""How much text one token can stand for: a text that is longer than all of a model's tokens needs no tokenizing."""

from __future__ import annotations

from collections.abc import Iterator
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
    added = tokenizer.get_added_tokens_decoder().values()
    if model.get("type") != "BPE" or any(token.lstrip or token.rstrip for token in added):
        return None
    splitters = list(_parts(component_state(tokenizer.pre_tokenizer)))
    normalizers = list(_parts(component_state(tokenizer.normalizer)))
    by_byte = any(part["type"] == "ByteLevel" for part in (*splitters, *normalizers))
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if not (model.get("byte_fallback") or (by_byte and all(letter in vocabulary for letter in ByteLevel.alphabet()))):
        return None
    if any(part["type"] not in _SPLITTERS or part.get("behavior") == "Removed" for part in splitters):
        return None
    shrinks = 1
    for part in normalizers:
        replaced = part.get("pattern", {}).get("String", "") if part["type"] == "Replace" else ""
        if part["type"] not in _SHRINKS or (part["type"] == "Replace" and not _keeps_length(replaced, part)):
            return None
        shrinks *= _SHRINKS[part["type"]]
    # A letter of a byte-level token is a byte, and no character has fewer.
    return shrinks * max(map(len, vocabulary))


def _keeps_length(replaced: str, part: dict[str, Any]) -> bool:
    return bool(replaced) and len(part.get("content", "")) >= len(replaced)


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
