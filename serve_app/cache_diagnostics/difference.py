"""The classification of the first difference between two texts."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Literal

DifferenceKind = Literal["time", "id"]
"""The kind of a value that changes between requests: a date, time or timestamp; a UUID, or a separate number."""
Difference = DifferenceKind | Literal["whitespace", "reordered", "text"]

VALUE_CHARS = 80
"""The maximum length of a value."""
MAX_CHARS = 16 << 10
"""The maximum text read after a difference to classify it."""
SPACE_CHARS = 24

_WEEKDAY = r"(?:(?:mon|tue|wed|thu|fri|sat|sun)[a-z]*\.?,?\s+)?"
_MONTH = r"(?:jan|feb|mar|apr|may|june?|july?|aug|sept?|oct|nov|dec)[a-z]*\.?"
_DAY, _YEAR = r"(?:0?[1-9]|[12]\d|3[01])", r"(?:19|20)\d\d"
_TIMES = (
    rf"{_YEAR}([-/.]?)(?:0[1-9]|1[0-2])\1{_DAY}(?!\d)",
    rf"{_DAY}([./-]){_DAY}\1(?:{_YEAR}|\d\d)(?![./-]?\d)",
    rf"{_WEEKDAY}{_DAY}(?:st|nd|rd|th)?[\s-](?:of\s)?{_MONTH}(?:,?[\s-]{_YEAR})?(?!\w)",
    rf"{_WEEKDAY}{_MONTH}\s{_DAY}(?:st|nd|rd|th)?(?:,?\s{_YEAR})?(?!\w)",
    rf"{_YEAR}\s?[年년]\s?\d{{1,2}}\s?[月월]\s?\d{{1,2}}\s?[日일]",
    r"(?:\d\d|\d(?=:\d\d(?::\d|\s?[ap]\.?m)))(?::[0-5]\d){1,2}(?:[.,]\d+)?(?:\s?[ap]\.?m\b)?(?![\d:])",
    r"(?:[01]?\d|2[0-3])\s?[h時时시]\s?[0-5]\d(?!\d)",
    r"1[4-9]\d{8}(?:\.\d{1,9}|\d{3}|\d{6}|\d{9})?(?![\w-])(?!\.\d)",
)
# A separate number: not part of a version, price, percentage or phone number.
_NUMBER = r"(?<![\w.,:$€£¥+/-])\d{1,9}(?!\w)(?![.,:/-]\d)(?!\s?[%€$£°])"
_PATTERNS: tuple[tuple[DifferenceKind, re.Pattern[str]], ...] = (
    ("id", re.compile(r"(?<![0-9a-f])[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}(?![0-9a-f])", re.I)),
    ("id", re.compile(r"(?<![0-9A-Za-z])0[0-7][0-9A-HJKMNP-TV-Z]{24}(?![0-9A-Za-z])")),  # a ULID
    *(("time", re.compile(rf"(?<![a-su-z0-9.:]){pattern}", re.I)) for pattern in _TIMES),
    ("id", re.compile(_NUMBER)),
)
_SPACE = re.compile(r"[\s\u200b\u200c\u200d\u2060\ufeff]+")
_WORDS = re.compile(r"\w+|[^\w\s,]")
_WORD_THERE = re.compile(r"\s*\S+|\s+")


def _values_at(text: str, place: int) -> Iterator[tuple[DifferenceKind, int, str]]:
    """Yield kind, start and text of the values that contain the character at ``place``, or end there."""
    begin = max(0, place - VALUE_CHARS)
    for kind, pattern in _PATTERNS:
        for match in pattern.finditer(text, begin, place + VALUE_CHARS):
            if match.start() <= place <= match.end():
                yield kind, match.start(), match.group()


def classify(new: str, old: str, place: int) -> Difference:
    """Return the class of the difference at ``place`` between two texts that are equal before it."""
    if _differs_in_space(new, old, place):
        return "whitespace"
    before = {(kind, start): value for kind, start, value in _values_at(old, place)}
    for kind, start, value in _values_at(new, place):
        if before.get((kind, start), value) != value:
            return kind
    return "reordered" if _is_reordered(new, old, place) else "text"


def value_there(text: str, place: int) -> str:
    """Return the value at a place of a text, or the rest of the word there, at most 64 characters."""
    for _, _, value in _values_at(text, place):
        return value[:64]
    word = _WORD_THERE.match(text, place)
    return word.group()[:64] if word else ""


def _differs_in_space(new: str, old: str, place: int) -> bool:
    rests = [text[place : place + 16 * SPACE_CHARS] for text in (new, old)]
    # At a place between two words, either text may have the space.
    if not any(_SPACE.match(rest) for rest in rests):
        return False
    new_words, old_words = (_SPACE.sub("", rest)[:SPACE_CHARS] for rest in rests)
    return new_words == old_words != ""


def _is_reordered(new: str, old: str, place: int) -> bool:
    """Return whether the lines from the place on are equal in another order, or the fields of one JSON line."""
    start = new.rfind("\n", 0, place) + 1
    lines = (text[start : start + MAX_CHARS].split("\n") for text in (new, old))
    unmatched: Counter[str] = Counter()
    for count, (new_line, old_line) in enumerate(zip(*lines, strict=False), 1):
        for line, sign in ((new_line, 1), (old_line, -1)):
            words = " ".join(sorted(_WORDS.findall(line)))
            unmatched[words] += sign
            if not unmatched[words]:
                del unmatched[words]
        if not unmatched:
            return count > 1 or '":' in new_line
    return False
