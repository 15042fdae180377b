"""Values that change from one request to the next, as texts write them: dates, times, uuids, epochs, counters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

Kind = Literal["date", "time", "uuid", "epoch", "counter"]


class Value(NamedTuple):
    """One value, from ``start`` to ``end`` in characters of its text."""

    kind: Kind
    start: int
    end: int


MAX_VALUE_CHARS = 80
_DAY, _YEAR = r"(?:0?[1-9]|[12]\d|3[01])", r"(?:19|20)\d\d"
_MONTH = r"(?:jan|feb|mar|apr|may|june?|july?|aug|sept?|oct|nov|dec)[a-z]*\.?"
_WEEKDAY = r"(?:(?:mon|tue|wed|thu|fri|sat|sun)[a-z]*\.?,?\s+)?"
_DATE = "|".join(
    (
        rf"{_YEAR}([-/.])(?:0?[1-9]|1[0-2])\1{_DAY}(?!\d)",
        rf"{_YEAR}(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])(?!\d)",
        rf"{_YEAR}\s?[年년]\s?\d{{1,2}}\s?[月월]\s?\d{{1,2}}\s?[日일]",
        rf"{_DAY}([./-]){_DAY}\2(?:{_YEAR}|\d\d)(?![./-]?\d)",
        rf"{_WEEKDAY}{_DAY}(?:st|nd|rd|th)?[\s-](?:of\s)?{_MONTH}(?:,?[\s-]{_YEAR})?(?!\w)",
        rf"{_WEEKDAY}{_MONTH}\s{_DAY}(?:st|nd|rd|th)?(?:,?\s{_YEAR})?(?!\w)",
    )
)
_HOUR = r"(?:[01]?\d|2[0-3])"
_TIME = "|".join(
    (
        rf"{_HOUR}:[0-5]\d(?::[0-5]\d(?:[.,]\d+)?)?\s?[ap]\.?m\b",
        rf"{_HOUR}:[0-5]\d:[0-5]\d(?:[.,]\d+)?",
        r"\d\d:[0-5]\d(?![\d:])",
        rf"{_HOUR}\s?[h时時시]\s?[0-5]\d(?!\d)",
    )
)
_PATTERNS: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("uuid", re.compile(r"(?<![0-9a-f])[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}(?![0-9a-f])", re.I)),
    ("uuid", re.compile(r"(?<![0-9A-Za-z])0[0-7][0-9A-HJKMNP-TV-Z]{24}(?![0-9A-Za-z])")),  # a ULID
    ("date", re.compile(rf"(?<![a-z0-9.])(?:{_DATE})", re.I)),
    ("time", re.compile(rf"(?<![\d:.])(?:{_TIME})", re.I)),
    ("epoch", re.compile(r"(?<![\w.,-])1[4-9]\d{8}(?:\.\d{1,9}|\d{3}|\d{6}|\d{9})?(?![\w-])(?!\.\d)")),
    # Not a version, a price, a share, a phone number.
    ("counter", re.compile(r"(?<![\w.,:$€£¥+/-])\d{1,9}(?!\w)(?![.,:/-]\d)(?!\s?[%€$£°])")),
)
_COUNTED = re.compile(
    r"(?:request|turn|message|question|attempt|retry|visit|visitor|step|iteration|round|conversation|session|call|query"
    r"|run|seq|count|counter|index|queue|remaining|left|online|views?|number|no\.|token|nonce|user|total)s?\b|#",
    re.I,
)
_NEAR_CHARS = 28


def values(text: str, start: int = 0, end: int | None = None) -> Iterator[Value]:
    """Yield the values that begin from ``start`` to ``end``, for each kind in the order of the text."""
    end = len(text) if end is None else end
    for kind, pattern in _PATTERNS:
        # No value is longer: a search for the next one would go through the whole text.
        for match in pattern.finditer(text, start, end + MAX_VALUE_CHARS):
            if match.start() > end:
                break
            if kind != "counter" or _is_counted(text, match):
                yield Value(kind, match.start(), match.end())


def value_at(text: str, place: int) -> Iterator[Value]:
    """Yield the values that hold the character at ``place``, or end there."""
    for value in values(text, max(0, place - MAX_VALUE_CHARS), place):
        if value.start <= place <= value.end:
            yield value


def _is_counted(text: str, match: re.Match[str]) -> bool:
    """Return whether a word near a number, in its line, is that of something that is counted."""
    before = text[max(0, match.start() - _NEAR_CHARS) : match.start()].rpartition("\n")[2]
    behind = text[match.end() : match.end() + _NEAR_CHARS].partition("\n")[0]
    return bool(_COUNTED.search(before) or _COUNTED.search(behind))
