"""Values that change from one request to the next, as texts write them: dates, times, uuids, epochs, counters.

Owns the patterns and what is like them and stays (versions, prices, phone numbers). One value at a place of a text;
whether it changed is for others to say.
"""

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


_MONTH = (
    r"(?:jan(?:uary|uar|vier|eiro|\.)?|enero|gennaio|feb(?:ruary|ruar|rero|braio|\.)?|f[ée]v(?:rier|ereiro|\.)?"
    r"|mar(?:ch|s|zo|ço|\.)?|märz|mär|apr(?:il|ile|\.)?|avr(?:il|\.)?|abr(?:il|\.)?|may|mai|mayo|maggio|maio"
    r"|june?|juni|juin|junio|giugno|junho|july?|juli|juil(?:let|\.)?|julio|luglio|julho"
    r"|aug(?:ust|\.)?|août|agosto|ago|sep(?:t(?:ember|embre|\.)?|tiembre|\.)?|settembre|setembro|set"
    r"|o[ck]t(?:ober|obre|\.)?|ottobre|outubro|out|nov(?:ember|embre|iembre|embro|\.)?"
    r"|de[cz](?:ember|embre|embro|\.)?|d[ée]c(?:embre|\.)?|diciembre|dic(?:embre)?)"
)
_WEEKDAY = (
    r"(?:(?:mon|tues|wednes|thurs|fri|satur|sun)day|mon|tue|wed|thu|fri|sat|sun|montag|dienstag|mittwoch|donnerstag"
    r"|freitag|samstag|sonntag|lundi|mardi|mercredi|jeudi|vendredi|samedi|dimanche|lunes|martes|miércoles|jueves"
    r"|viernes|sábado|domingo|lunedì|martedì|mercoledì|giovedì|venerdì|sabato|domenica|segunda|terça|quarta|quinta|sexta)"
)
_DAY, _YEAR = r"(?:0?[1-9]|[12]\d|3[01])", r"(?:19|20)\d\d"
_DATES = (
    rf"{_YEAR}([-/.])(?:0?[1-9]|1[0-2])\1{_DAY}(?!\d)",
    rf"{_YEAR}\s?年\s?\d{{1,2}}\s?月\s?\d{{1,2}}\s?日",
    rf"{_YEAR}\s?년\s?\d{{1,2}}\s?월\s?\d{{1,2}}\s?일",
    rf"{_YEAR}(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])(?!\d)",
    rf"{_YEAR}-W[0-5]\d(?:-\d)?",
    rf"{_DAY}([./-])(?:0?[1-9]|1[0-2])\2{_YEAR}(?!\d)",
    rf"(?:0?[1-9]|1[0-2])([/-]){_DAY}\3(?:{_YEAR}|\d\d)(?![\d/-])",
    rf"{_DAY}([/-])(?:0?[1-9]|1[0-2])\4\d\d(?![\d/-])",
    rf"{_DAY}\.(?:0?[1-9]|1[0-2])\.\d\d(?![\d.])",
    rf"(?:{_WEEKDAY}\.?,?\s+(?:the\s+|den\s+|el\s+|le\s+)?)?{_DAY}(?:st|nd|rd|th|\.|er|º)?[\s-](?:of\s+|de\s+)?{_MONTH}"
    rf"(?:,?[\s-](?:de\s+|del\s+)?(?:{_YEAR}|'?\d\d)(?!\d))?(?!\w)",
    rf"(?:{_WEEKDAY}\.?,?\s+)?{_MONTH}\s{_DAY}(?:st|nd|rd|th)?(?:,?\s{_YEAR})?(?!\w)",
    rf"(?<=today is )(?:{_WEEKDAY})(?!\w)",
)
_TIMES = (
    r"(?:[01]?\d|2[0-3])[:.][0-5]\d(?:[:.][0-5]\d(?:[.,]\d{1,9})?)?\s?[ap]\.?m\.?(?!\w)",
    r"(?:[01]?\d|2[0-3]):[0-5]\d:[0-5]\d(?:[.,]\d{1,9})?(?!\d)",
    r"(?:[01]\d|2[0-3]):[0-5]\d(?![\d:])",
    r"(?:[01]?\d|2[0-3]):[0-5]\d(?![\d:])",
    r"(?:[01]?\d|2[0-3])\s?[h时時시]\s?[0-5]\d(?:\s?[分분])?(?:\s?\d\d\s?[秒초])?(?!\d)",
    r"\d{1,3}\s(?:seconds?|minutes?|hours?)\sago(?!\w)",
)
_CJK = r"[_\u3000-\u9fff\uac00-\ud7af]"
_PATTERNS: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("uuid", re.compile(r"(?<![0-9a-f])[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}(?![0-9a-f])", re.I)),
    ("uuid", re.compile(r"(?<![0-9A-Za-z])0[0-7][0-9A-HJKMNP-TV-Z]{24}(?![0-9A-Za-z])")),  # a ULID
    ("date", re.compile(rf"(?<![\w.])(?:{'|'.join(_DATES)})", re.I)),
    ("date", re.compile(rf"(?<={_CJK})(?:{'|'.join(_DATES[:3])})")),
    ("time", re.compile(rf"(?<![\d:.])(?:{'|'.join(_TIMES)})", re.I)),
    ("epoch", re.compile(r"(?<![\w.,-])1[4-9]\d{8}(?:\.\d{1,9}|\d{3}|\d{6}|\d{9})?(?![\w-])(?!\.\d)")),
    (
        "counter",
        re.compile(
            r"(?<![\w.,:$€£¥+/-])\d{1,9}(?:,\d{3})*(?!\w)(?![.,:/-]\d)(?!\s?[%€$£°]|\s?(?:usd|eur|gbp)\b)", re.I
        ),
    ),
)
_COUNTED = re.compile(
    r"(?:\b|_)(?:request|turn|message|question|answer|attempt|retry|visit|visitor|step|iteration|round|conversation"
    r"|session|call|query|run|tick|seq|sequence|count|counter|index|queue|unread|remaining|left|so far|online|views?"
    r"|number|no\.|token|user|people|item|nr\.?|nonce|hit|try|tries|epoch|offset|position|total)(?:e?s)?(?:\b|_)|#",
    re.I,
)
_RULES = re.compile(
    r"\b(?:at most|at least|max(?:imum)?|min(?:imum)?|up to|limit|version|section|paragraph|chapter|page|port|phone"
    r"|order|older than|more than|less than|fewer than|within|table|figure|room|isbn|price|costs?|size|top|postcode"
    r"|zip)\b",
    re.I,
)
_NUMBERS_OF_PEOPLE = re.compile(
    r"\b(?:phone|tel|call|fax|order|account|invoice|customer|isbn|iban|mobile)\b\W*(?:\w+\W+){0,2}$", re.I
)
_SCRIPTURE = re.compile(
    r"\b(?:genesis|exodus|psalms?|proverbs|isaiah|matthew|mark|luke|john|acts|romans|corinthians|surah?|verse|ratio"
    r"|aspect|score|scale|odds)\b\W*(?:\w+\W+){0,2}$",
    re.I,
)
_CONTEXT_CHARS = 40
MAX_VALUE_CHARS = 80


def values(text: str, start: int = 0, end: int | None = None) -> Iterator[Value]:
    """Yield the values that begin from ``start`` to ``end``, for each kind in the order of the text."""
    end = len(text) if end is None else end
    for kind, pattern in _PATTERNS:
        # No value is longer: a search for the next one would go through the whole text.
        for match in pattern.finditer(text, start, end + MAX_VALUE_CHARS):
            if match.start() > end:
                break
            if _stands(kind, text, match):
                yield Value(kind, match.start(), match.end())


def value_at(text: str, place: int, kinds: tuple[Kind, ...]) -> Iterator[Value]:
    """Yield the values that hold the character at ``place``, or end there."""
    begin = max(0, place - 64)
    for value in values(text, begin, place):
        if value.start <= place <= value.end and value.kind in kinds:
            yield value


def _stands(kind: Kind, text: str, match: re.Match[str]) -> bool:
    """Return whether what stands around a value lets it be of its kind."""
    line_start = text.rfind("\n", 0, match.start()) + 1
    before = text[max(line_start, match.start() - _CONTEXT_CHARS) : match.start()]
    after = text[match.end() : match.end() + _CONTEXT_CHARS].partition("\n")[0]
    if kind == "epoch":
        return not _NUMBERS_OF_PEOPLE.search(before)
    if kind == "time":
        bare = len(match.group()) <= 5 and ":" in match.group() and not match.group()[-1].isalpha()
        if not bare:
            return True
        return not _SCRIPTURE.search(before)
    if kind == "counter":
        if _RULES.search(before) or _RULES.match(after.lstrip()):
            return False
        return bool(_COUNTED.search(before[-28:]) or _COUNTED.search(after[:24]))
    return True
