"""What in a prompt's file will not be the same with the next request: placeholders and values that change, spaces.

A file's own date is no find: only what its line says is of now. Compares two versions of a file too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from serve_app.misses.difference import Difference, classify, first_difference, value_there
from serve_app.misses.volatile import Kind, values

_PLACEHOLDER = re.compile(
    r"\{\{-?\s*(?P<double>[^{}\n]{1,80}?)\s*-?\}\}|\$\{(?P<shell>[^{}\n]{1,80})\}|<%=?\s*(?P<erb>[^%\n]{1,80}?)\s*%>"
    r"|%\((?P<percent>\w{1,60})\)[sd]|\{(?P<single>[A-Za-z_][\w.()!:%-]{0,60})\}|\$\((?P<command>date\b[^()\n]{0,60})\)"
)
_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_WORDS: dict[str, Kind] = {
    **dict.fromkeys(("date", "today", "day", "weekday", "yesterday", "tomorrow"), "date"),
    **dict.fromkeys(("now", "time", "datetime", "clock", "strftime", "utcnow"), "time"),
    **dict.fromkeys(("uuid", "guid", "ulid", "nonce"), "uuid"),
    **dict.fromkeys(("timestamp", "epoch", "unixtime", "ts"), "epoch"),
    **dict.fromkeys(("counter", "turn", "attempt", "iteration", "seq"), "counter"),
}  # fmt: skip
_IDS = frozenset(("request", "session", "trace", "correlation", "conversation", "run", "span", "message", "thread"))
_NOT_NOW = frozenset(("zone", "timezone", "out", "limit", "format", "birth", "delivery", "response", "max", "created"))
_OF_NOW = re.compile(
    r"\b(?:today|now|current|currently|as of|generated|rendered|it is|date|time|timestamp|clock|ts|heute"
    r"|jetzt|stand|hoy|hoje|oggi|nous sommes|il est)\b|今天|现在|오늘|今日",
    re.I,
)
_COUNTS = re.compile(
    r"\b(?:request|turn|attempt|message|visit|visitor|iteration|conversation|seq)\b[\s=:]*(?:no\.|number|#)?\s*$"
    r"|#\s*$",
    re.I,
)
_ID = re.compile(r"\b(?:request|session|trace|correlation|conversation|run|thread|user|id|key)\b|[_-]id\b", re.I)
_ODD_SPACES = re.compile("[\u00a0\u2000-\u200d\u2060\ufeff]")


@dataclass(frozen=True, slots=True)
class Find:
    """One place. ``line`` from 1; ``char`` from the text's beginning; ``what``: a few words, with what stands there."""

    line: int
    char: int
    reason: Difference
    what: str


def lint(text: str) -> list[Find]:
    """Return what is not the same in each request, in the order of the text; one find for each place."""
    found: dict[int, Find] = {}
    for find in sorted(_finds(text), key=lambda find: find.char):
        found.setdefault(find.char, find)
    return list(found.values())


def compare(old: str, new: str) -> Find | None:
    """Return the first difference of two versions, None where there is none."""
    if old == new:
        return None
    at = first_difference(new, old)
    reason = classify(new, old, at)
    return Find(new.count("\n", 0, at) + 1, at, reason, f"differs in {reason}: {value_there(new, at)!r}")


def _finds(text: str) -> Iterator[Find]:
    for match in _PLACEHOLDER.finditer(text):
        kind = _placeholder_kind(match.group(match.lastgroup or 0))
        if kind is not None:
            yield _find(text, match.start(), kind, f"placeholder of a {kind}: {match.group()[:64]}")
    for value in values(text):
        if _is_of_now(text, value.kind, value.start, value.end):
            shown = text[value.start : value.end]
            yield _find(text, value.start, value.kind, f"{value.kind}: {shown[:64]}")
    yield from _spaces(text)


def _placeholder_kind(name: str) -> Kind | None:
    """Return what a placeholder stands for by its name's words, None for what may stay the same."""
    words = [word.lower() for word in _PART.findall(name)]
    if _NOT_NOW & set(words):
        return None
    for word in words:
        if word in _WORDS:
            return _WORDS[word]
    return "uuid" if "id" in words and _IDS & set(words) else None


def _is_of_now(text: str, kind: Kind, start: int, end: int) -> bool:
    """Return whether a line says that its value is that of the moment, or of one request."""
    line_start = text.rfind("\n", 0, start) + 1
    before = text[line_start:start][-60:]
    if kind == "counter":
        return bool(_COUNTS.search(before))
    if kind == "uuid":
        return bool(_ID.search(before))
    return bool(_OF_NOW.search(before))


def _spaces(text: str) -> Iterator[Find]:
    at = 0
    mixed = "\r\n" in text and bool(re.search(r"(?<!\r)\n", text))
    for line in text.splitlines(keepends=True):
        body = line.rstrip("\r\n")
        if body != body.rstrip(" \t"):
            yield _find(text, at + len(body.rstrip(" \t")), "whitespace", "spaces at the end of the line")
        elif mixed and line.endswith("\r\n"):
            yield _find(text, at + len(body), "whitespace", "ends with CR LF, other lines with LF")
        for match in _ODD_SPACES.finditer(body):
            yield _find(text, at + match.start(), "whitespace", f"the character U+{ord(match.group()):04X}")
        at += len(line)


def _find(text: str, char: int, reason: Difference, what: str) -> Find:
    return Find(text.count("\n", 0, char) + 1, char, reason, what)
