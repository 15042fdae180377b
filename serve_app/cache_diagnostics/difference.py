"""Where two prompts differ first, of which class the difference is, and how much behind it is equal again."""

from __future__ import annotations

import re
from collections import Counter
from typing import Literal

import numpy as np
import numpy.typing as npt

from router.protocol.block_hash import TokenArray
from serve_app.cache_diagnostics.values import Kind, value_at

Difference = Kind | Literal["whitespace", "reordered", "text"]

GRAM = 8
"""Tokens that are taken for the same place in two prompts where they are equal."""
MAX_CHARS = 16 << 10
"""Of what is read behind a difference to find its class."""
SPACE_CHARS = 24

_MULTIPLIERS = np.array(
    [(0x9E3779B97F4A7C15 * (2 * power + 1)) % 2**64 | 1 for power in range(GRAM)], dtype=np.uint64
)  # fmt: skip
_SPACE = re.compile(r"[\s\u200b\u200c\u200d\u2060\ufeff]+")
_WORDS = re.compile(r"\w+|[^\w\s,]")
_WORD_THERE = re.compile(r"\s*\S+|\s+")

Hashes = npt.NDArray[np.uint64]


def grams(ids: TokenArray) -> Hashes:
    """Return a hash of the ``GRAM`` tokens from each token on; none where there are fewer."""
    count = len(ids) - GRAM + 1
    if count < 1:
        return np.empty(0, dtype=np.uint64)
    wide = ids.astype(np.uint64) + np.uint64(1)
    sums = np.zeros(count, dtype=np.uint64)
    for offset in range(GRAM):
        part = wide[offset : offset + count] * _MULTIPLIERS[offset]
        sums += part ^ (part >> np.uint64(29))
    sums *= np.uint64(0xBF58476D1CE4E5B9)
    return sums ^ (sums >> np.uint64(32))


def equal_behind(new: TokenArray, old: TokenArray, start: int) -> int:
    """Return how many tokens of ``new`` from ``start`` on stand in a gram that ``old`` has from there on, too."""
    equal = np.isin(grams(new[start:]), grams(old[start:]))
    return int(np.count_nonzero(np.convolve(equal, np.ones(GRAM)))) if equal.any() else 0


def first_difference(new: str, old: str) -> int:
    """Return how many leading characters two texts have in common."""
    low, high = 0, min(len(new), len(old))
    while low < high:
        middle = (low + high + 1) // 2
        if new[low:middle] == old[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def classify(new: str, old: str, place: int) -> Difference:
    """Return the class of the difference at ``place`` of two texts, which are equal before it."""
    if _differs_in_space(new, old, place):
        return "whitespace"
    before = {(value.kind, value.start): old[value.start : value.end] for value in value_at(old, place)}
    for value in value_at(new, place):
        other = before.get((value.kind, value.start))
        if other is not None and other != new[value.start : value.end]:
            return value.kind
    return "reordered" if _is_reordered(new, old, place) else "text"


def value_there(text: str, place: int) -> str:
    """Return the value that holds a place of a text, or the rest of the word there; at most 64 characters."""
    for value in value_at(text, place):
        if value.start <= place < value.end:
            return text[value.start : value.end][:64]
    word = _WORD_THERE.match(text, place)
    return word.group()[:64] if word else ""


def _differs_in_space(new: str, old: str, place: int) -> bool:
    rests = [text[place : place + 16 * SPACE_CHARS] for text in (new, old)]
    # At a place between two words either may have the space.
    if not any(_SPACE.match(rest) for rest in rests):
        return False
    new_words, old_words = (_SPACE.sub("", rest)[:SPACE_CHARS] for rest in rests)
    return new_words == old_words != ""


def _is_reordered(new: str, old: str, place: int) -> bool:
    """Return whether lines from that of the place on are the same in another order, or one line of JSON's fields."""
    start = new.rfind("\n", 0, place) + 1
    new_lines, old_lines = (text[start : start + MAX_CHARS].split("\n") for text in (new, old))
    balance: Counter[str] = Counter()
    for count, pair in enumerate(zip(new_lines, old_lines, strict=False), 1):
        for line, sign in zip(pair, (1, -1), strict=True):
            words = " ".join(sorted(_WORDS.findall(line)))
            balance[words] += sign
            if not balance[words]:
                del balance[words]
        if not balance:
            return count > 1 or '":' in pair[0]
    return False
