"""What in a prompt's file will not be the same with the next request: placeholders and values of now, odd spaces.

A file's own date is no find: only what its line says is of now. Compares two versions of a file too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from serve_app.cache_diagnostics.difference import Difference, classify, first_difference, value_there
from serve_app.cache_diagnostics.values import Kind, values

_PLACEHOLDER = re.compile(
    r"\{\{-?\s*([^{}\n]{1,80}?)\s*-?\}\}|\$\{([^{}\n]{1,80})\}|<%=?\s*([^%\n]{1,80}?)\s*%>"
    r"|%\((\w{1,60})\)[sd]|\{([A-Za-z_][\w.()!:%-]{0,60})\}|\$\((date\b[^()\n]{0,60})\)"
)
_NAMES: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("date", re.compile(r"(?<![a-z])(?:date|today|day|weekday|yesterday|tomorrow)(?![a-z])", re.I)),
    ("time", re.compile(r"(?<![a-z])(?:now|time|datetime|clock|strftime|utcnow)(?![a-z])", re.I)),
    ("uuid", re.compile(r"uuid|guid|ulid|nonce|(?:request|session|trace|conversation|run|message|thread)_?id", re.I)),
    ("epoch", re.compile(r"timestamp|epoch|unixtime", re.I)),
    ("counter", re.compile(r"counter|turn|attempt|iteration", re.I)),
)
"""What a placeholder's name says that it stands for; of the first kind that fits."""
_LASTING = re.compile(r"zone|timeout|limit|format|birth|delivery|response|max|created", re.I)
_OF_NOW: dict[Kind, re.Pattern[str]] = {
    "counter": re.compile(
        r"(?:request|turn|attempt|message|visit|iteration|conversation)[\s=:]*(?:no\.|number|#)?\s*$|#\s*$", re.I
    ),
    "uuid": re.compile(r"request|session|trace|conversation|run|thread|user|id\b|key", re.I),
}
_NOW = re.compile(
    r"\b(?:today|now|current(?:ly)?|as of|generated|rendered|it is|date|time|timestamp)\b|今天|现在|오늘|今日", re.I
)
"""What a line says before a value that is of now; ``_OF_NOW`` where a kind has words of its own."""
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
    finds: dict[int, Find] = {}
    for find in sorted(_finds(text), key=lambda find: find.char):
        finds.setdefault(find.char, find)
    return list(finds.values())


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
        kind = next((kind for kind, names in _NAMES if names.search(name) and not _LASTING.search(name)), None)
        if kind is not None:
            yield _find(text, match.start(), kind, f"placeholder of a {kind}: {match.group()[:64]}")
    for value in values(text):
        before = text[max(0, value.start - 60) : value.start].rpartition("\n")[2]
        if _OF_NOW.get(value.kind, _NOW).search(before):
            yield _find(text, value.start, value.kind, f"{value.kind}: {text[value.start : value.end][:64]}")
    for match in _SPACES.finditer(text):
        what = "spaces at the end of the line" if match.group("end") else f"the character U+{ord(match.group()):04X}"
        yield _find(text, match.start(), "whitespace", what)
    if "\r\n" in text and (lone := re.search(r"(?<!\r)\n", text)):
        yield _find(text, lone.start(), "whitespace", "ends with LF, other lines with CR LF")


def _find(text: str, char: int, reason: Difference, what: str) -> Find:
    return Find(text.count("\n", 0, char) + 1, char, reason, what)
