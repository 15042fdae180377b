"""OpenAI's explicit prompt caching: marks in a conversation's parts, and how long what they mark is kept."""

import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field

from serve_app.api.json_body import JsonBody, Must
from serve_app.errors import InvalidRequest

MARK = "prompt_cache_breakpoint"
MAX_MARKS = 4
"""A request keeps the prefixes of its latest marks. Source: OpenAI's guide to prompt caching."""
DAY_S = 86400.0
_DEFAULT_TTL = "30m"
_TTL_SAID = "a time like 30m or 12h, at most 24h"
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}
_PARTS = ("content", "output")


def _is_ttl(ttl: str) -> str:
    if not _seconds(ttl):
        raise ValueError
    return ttl


def _seconds(ttl: Any) -> float:
    """Return a time's seconds, 0 for an invalid one."""
    match = re.fullmatch(r"([1-9]\d{0,4})([smh])", ttl) if isinstance(ttl, str) else None
    seconds = float(match[1]) * _UNITS_S[match[2]] if match else 0.0
    return seconds if seconds <= DAY_S else 0.0


class CacheOptions(JsonBody):
    """``mode`` explicit: only what is marked is kept; without a mark nothing is stored. ``ttl``: of the marks."""

    mode: Annotated[Literal["implicit", "explicit"], Must("implicit or explicit")] = "implicit"
    ttl: Annotated[str, AfterValidator(_is_ttl), Must(_TTL_SAID)] | None = Field(None)


class Mark(NamedTuple):
    """A mark in item ``at``: ``cut``, the item up to its marked part; it keeps its prefix for ``ttl_s``."""

    at: int
    cut: dict[str, Any]
    ttl_s: float


def take_marks(unread: set[str]) -> bool:
    """Return whether conversations' parts have marks: then they are among the ``unread`` fields, and are taken out."""
    marks = {path for path in unread if path.endswith(f".content[].{MARK}")}
    unread -= marks
    return bool(marks)


def marks_in(items: Sequence[Any], ttl: str | None, path: str) -> list[Mark]:
    """Return the latest marks in the parts of messages or items. Raises InvalidRequest for one of another form.

    ``ttl``: of marks that say none. ``path``: of the items, for errors.
    """
    marks: deque[tuple[int, str, int, float]] = deque(maxlen=MAX_MARKS)
    for at, item in enumerate(items):
        for name in _PARTS:
            parts = item.get(name) if isinstance(item, dict) else None
            for number, part in enumerate(parts if isinstance(parts, list) else ()):
                if isinstance(part, dict) and part.get(MARK) is not None:
                    ttl_s = _ttl_s(part[MARK], ttl, f"{path}[{at}].{name}[{number}].{MARK}")
                    marks.append((at, name, number, ttl_s))
    # Only now: every mark's own copy of the parts before it would be a square.
    return [Mark(at, {**items[at], name: items[at][name][: number + 1]}, ttl_s) for at, name, number, ttl_s in marks]


def _ttl_s(mark: Any, ttl: str | None, field: str) -> float:
    seconds = 0.0
    if isinstance(mark, Mapping) and mark.get("mode", "explicit") == "explicit":
        seconds = _seconds(mark.get("ttl") or ttl or _DEFAULT_TTL)
    if not seconds:
        raise InvalidRequest(f'{field} must be {{"mode": "explicit"}}, with a ttl or none: {_TTL_SAID}.', param=field)
    return seconds
