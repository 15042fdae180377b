"""What in a prompt's file will not be the same with the next request: placeholders and values of now, odd spaces.

A file's own date is no find: only what its line says is of now. Compares two versions of a file too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from serve_app.cache_diagnostics.difference import Difference, Kind, classify, value_there, values
from serve_app.prompts.lock import first_difference

_PLACEHOLDER = re.compile(
    r"\{\{-?\s*([^{}\n]{1,80}?)\s*-?\}\}|\$\{([^{}\n]{1,80})\}|<%=?\s*([^%\n]{1,80}?)\s*%>"
    r"|%\((\w{1,60})\)[sd]|\{([A-Za-z_][\w.()!:%-]{0,60})\}|\$\((date\b[^()\n]{0,60})\)"
)
_NAMES: dict[Kind, re.Pattern[str]] = {
    "time": re.compile(
        r"(?<![a-z])(?:date|today|day|weekday|yesterday|tomorrow|now|time|datetime|clock|strftime|utcnow)(?![a-z])"
        r"|timestamp|epoch|unixtime",
        re.I,
    ),
    "id": re.compile(
        r"uuid|guid|ulid|nonce|(?:request|session|trace|conversation|run|message|thread)_?id"
        r"|counter|turn|attempt|iteration",
        re.I,
    ),
}
"""What a placeholder's name says that it stands for; the first kind that fits."""
_LASTING = re.compile(r"zone|timeout|limit|format|birth|delivery|response|max|created", re.I)
_OF_NOW: dict[Kind, re.Pattern[str]] = {
    "time": re.compile(
        r"\b(?:today|now|current(?:ly)?|as of|generated|rendered|it is|date|time|timestamp)\b|今天|现在|오늘|今日", re.I
    ),
    "id": re.compile(
        r"(?:request|session|trace|turn|attempt|message|visit|iteration|conversation|run|thread|user|id|key)"
        r"[\s=:]*(?:no\.|number|id|#)?[\s=:]*$|#\s*$",
        re.I,
    ),
}
"""What a line says before a value that is of now."""
_SPACES = re.compile("(?P<end>[ \\t]+(?=\\r?$))|(?P<odd>[\u00a0\u2000-\u200d\u2060\ufeff])", re.M)


@dataclass(frozen=True, slots=True)
class Find:
    """One place. ``line`` from 1; ``char`` from the text's beginning; ``what``: a few words, with what stands there."""

    line: int
    char: int
    reason: Difference
    what: str


def lint(text: str) -> list[Find]:
    """Return what is not the same in each request, in the order of the text; one find for each place."""
    by_place = {find.char: find for find in reversed(list(_finds(text)))}
    return [by_place[char] for char in sorted(by_place)]


def compare(old: str, new: str) -> Find | None:
    """Return the first difference of two versions, None where there is none."""
    if old == new:
        return None
    at = first_difference(new, old)
    reason = classify(new, old, at)
    return _find(new, at, reason, f"differs in {reason}: {value_there(new, at)!r}")


def _finds(text: str) -> Iterator[Find]:
    for match in _PLACEHOLDER.finditer(text):
        name = match.group(match.lastindex or 0)
        kind = next((kind for kind, names in _NAMES.items() if names.search(name) and not _LASTING.search(name)), None)
        if kind is not None:
            yield _find(text, match.start(), kind, f"placeholder of a {kind}: {match.group()[:64]}")
    for value in values(text):
        before = text[max(0, value.start - 60) : value.start].rpartition("\n")[2]
        if _OF_NOW[value.kind].search(before):
            yield _find(text, value.start, value.kind, f"{value.kind}: {value.text[:64]}")
    for match in _SPACES.finditer(text):
        what = "spaces at the end of the line" if match.group("end") else f"the character U+{ord(match.group()):04X}"
        yield _find(text, match.start(), "whitespace", what)
    if "\r\n" in text and (lone := re.search(r"(?<!\r)\n", text)):
        yield _find(text, lone.start(), "whitespace", "ends with LF, other lines with CR LF")


def _find(text: str, char: int, reason: Difference, what: str) -> Find:
    return Find(text.count("\n", 0, char) + 1, char, reason, what)
