"""Where two prompts differ first, of which class the difference is, and how much behind it is equal again.

Scans are linear, over windows of bounded size.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Literal

import numpy as np
import numpy.typing as npt

from router.protocol.block_hash import TokenArray
from serve_app.misses.volatile import Kind, value_at
from serve_app.tokenization.public_tokens import common_tokens

Difference = Literal["date", "time", "uuid", "epoch", "counter", "whitespace", "reordered", "text"]

GRAM = 8
"""Tokens that are taken for the same place in two prompts where they are equal."""
RESUME_TOKENS = 2048
"""How far behind a difference the texts may go on as before."""
MAX_RESUMES = 24
RESUME_CHARS = 24
MAX_JSON_CHARS = 16 << 10

_MULTIPLIERS = np.array(
    [(0x9E3779B97F4A7C15 * (2 * power + 1)) % 2**64 | 1 for power in range(GRAM)], dtype=np.uint64
)  # fmt: skip
_SPACE = re.compile(r"[\s\u200b\u200c\u200d\u2060\ufeff]+")
_WORDS = re.compile(r"\w+|[^\w\s,]")
_ORDER: tuple[Kind, ...] = ("uuid", "date", "time", "epoch", "counter")

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
    """Return how many tokens of ``new`` behind the first difference, at ``start``, are equal to ``old``'s again."""
    at_new = at_old = start
    equal = 0
    for _ in range(MAX_RESUMES):
        window = RESUME_TOKENS + GRAM - 1
        here, there = grams(new[at_new : at_new + window]), grams(old[at_old : at_old + window])
        found = np.flatnonzero(np.isin(here, there))
        if not len(found):
            break
        skip = int(found[0])
        at_new += skip
        at_old += int(np.flatnonzero(there == here[skip])[0])
        run = common_tokens(new[at_new:], old[at_old:])
        if not run:  # two different grams with one hash
            break
        equal, at_new, at_old = equal + run, at_new + run, at_old + run
    return equal


def first_difference(new: str, old: str) -> int:
    """Return how many leading characters two texts have in common."""
    if new == old:
        return len(new)
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
    for kind in _ORDER:
        mine, theirs = list(value_at(new, place, (kind,))), list(value_at(old, place, (kind,)))
        for one in mine:
            for other in theirs:
                if one.start == other.start and new[one.start : one.end] != old[other.start : other.end]:
                    return kind
    return "reordered" if _reordered(new, old, place) else "text"


def value_there(text: str, place: int) -> str:
    """Return the value that holds a place of a text, or the rest of the word there; at most 64 characters."""
    for value in value_at(text, place, _ORDER):
        if value.start <= place < value.end:
            return text[value.start : value.end][:64]
    word = re.compile(r"\s*\S+|\s+").match(text, place)
    return word.group()[:64] if word else ""


def _differs_in_space(new: str, old: str, place: int) -> bool:
    rests = [text[place : place + 16 * RESUME_CHARS] for text in (new, old)]
    # At a place between two words either may have the space.
    if not any(_SPACE.match(rest) for rest in rests):
        return False
    mine, theirs = (_SPACE.sub("", rest)[:RESUME_CHARS] for rest in rests)
    return mine == theirs and bool(mine)


def _reordered(new: str, old: str, place: int) -> bool:
    """Return whether the texts differ in the order of a JSON value's parts, or of lines."""
    as_json = _reordered_json(new, old, place)
    return as_json or _reordered_lines(new, old, place, one_line=as_json is None)


def _reordered_json(new: str, old: str, place: int) -> bool | None:
    """Look at every JSON value that holds the place, the innermost first; None where none can be read whole."""
    begin = max(0, place - MAX_JSON_CHARS)
    opened: list[int] = []
    quoted = escaped = False
    for index in range(begin, place):
        char = new[index]
        if escaped:
            escaped = False
        elif quoted:
            escaped = char == "\\"
            quoted = char != '"'
        elif char == '"':
            quoted = True
        elif char == "\n" and not opened:
            quoted = False
        elif char in "{[":
            opened.append(index)
        elif char in "}]" and opened:
            opened.pop()
    decode = json.JSONDecoder().raw_decode
    found: bool | None = None
    for start in reversed(opened[-8:]):
        try:
            mine, theirs = (decode(text[start : start + MAX_JSON_CHARS])[0] for text in (new, old))
            found = _without_order(mine) == _without_order(theirs)
        except (ValueError, RecursionError):
            continue
        if found:
            break
    return found


def _without_order(value: object) -> str:
    def plain(part: object) -> object:
        if isinstance(part, dict):
            return {name: plain(part[name]) for name in sorted(part)}
        if isinstance(part, list):
            return sorted(map(plain, part), key=json.dumps)
        return part

    return json.dumps(plain(value))


def _reordered_lines(new: str, old: str, place: int, *, one_line: bool) -> bool:
    """Return whether some lines from that of the place on are the same in another order.

    ``one_line``: also whether one line has the same words in another order, where it has fields of JSON.
    """
    line = new.rfind("\n", 0, place) + 1
    mine, theirs = (text[line : line + MAX_JSON_CHARS].split("\n") for text in (new, old))
    balance: Counter[str] = Counter()
    for count, (one, other) in enumerate(zip(mine, theirs, strict=False), 1):
        for shown, sign in ((one, 1), (other, -1)):
            key = " ".join(sorted(_WORDS.findall(shown)))
            balance[key] += sign
            if not balance[key]:
                del balance[key]
        if not balance:
            return count > 1 or (one_line and '":' in one)
    return False
