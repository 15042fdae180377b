"""One call as a JSON object, ``{"name": ..., "arguments": {...}}``: its arguments are passed on while they come.

JSON is followed by its strings and brackets alone. Whether arguments are valid is for whoever uses them to see.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator

import msgspec

from serve_app.api.tool_calls import CallArguments, CallBegun
from serve_app.generation.tool_calls.source import Source, Steps

_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')
_AFTER_WORD = re.compile(r"[\s,:{}\[\]\"]")
_ARGUMENTS = ("arguments", "parameters")
_KEYS = {"name", "id", "type", *_ARGUMENTS}
_decode_string = msgspec.json.Decoder(str).decode

MakeId = Callable[[], str]
"""Returns the id of a new call."""


def json_call(source: Source, make_id: MakeId, names: frozenset[str] | None = None) -> Steps[bool]:
    """Read one call; return whether one has begun: if not, nothing was shown of what was read.

    It begins when its name and the opening of its arguments are known, in whatever order they come. ``names``: those
    that a call may have, None for any. Without arguments they are ``{}``. An object with another key before both
    is none: an answer that is JSON need not be held back.
    """
    begun = False
    name: str | None = None
    arguments = ""
    if not (yield from source.accept("{")):
        return False
    while True:
        yield from source.spaces()
        key = yield from _string(source)
        if key is None or (yield from source.spaces()) != ":":
            return begun
        source.take(1)
        opening = yield from source.spaces()
        if key == "name" and name is None:
            name = yield from _string(source)
            if name is None or (names is not None and name not in names):
                return begun
        elif key in _ARGUMENTS and not begun and not arguments and opening != "n":
            if opening != "{":
                return begun
            if name is None:
                arguments = yield from _whole(_value(source))
            else:
                begun = True
                yield CallBegun(make_id(), name)
                yield from stream_arguments(source)
        elif begun or key in _KEYS:
            yield from _whole(_value(source))
        else:
            return False
        if name is not None and arguments and not begun:
            begun = True
            yield CallBegun(make_id(), name)
            yield CallArguments(arguments)
        after = yield from source.spaces()
        if after == "}" and name is not None:
            source.take(1)
            if not begun:
                yield CallBegun(make_id(), name)
                yield CallArguments("{}")
            return True
        if after != ",":
            return begun
        source.take(1)


def stream_arguments(source: Source) -> Steps[None]:
    """Read a JSON object or list; yield it as arguments, piece by piece."""
    for piece in _value(source):
        yield None if piece is None else CallArguments(piece)


def _string(source: Source) -> Steps[str | None]:
    """Read a string and return what it says; None if there is none, or no valid one."""
    if (yield from source.peek()) != '"':
        return None
    raw = yield from _whole(_value(source))
    try:
        return _decode_string(raw)
    except msgspec.DecodeError:
        return None


def _whole(pieces: Generator[str | None, None, None]) -> Steps[str]:
    """Read a value and return its text."""
    parts: list[str] = []
    for piece in pieces:
        if piece is None:
            yield None
        else:
            parts.append(piece)
    return "".join(parts)


def _value(source: Source) -> Generator[str | None, None, None]:
    """Read the JSON value that is next; yield its text as it comes, and None where more is needed."""
    opening = source.text[source.position : source.position + 1]
    return _nested(source) if opening in ('"', "{", "[") else _word(source)


def _nested(source: Source) -> Generator[str | None, None, None]:
    """Read a string, an object or a list."""
    depth = 0
    in_string = escaped = False
    while True:
        text, start = source.text, source.position
        at, closed = start, False
        if escaped and at < len(text):
            at, escaped = at + 1, False
        while not closed and (found := (_INSIDE if in_string else _OUTSIDE).search(text, at)):
            at = found.end()
            if found.group() == "\\":
                escaped = at == len(text)
                at += not escaped
                continue
            if found.group() == '"':
                in_string = not in_string
            else:
                depth += 1 if found.group() in "{[" else -1
            closed = depth == 0 and not in_string
        if not closed:
            at = len(text)
        if at > start:
            yield source.take(at - start)
        if closed or source.ended:
            return
        yield None


def _word(source: Source) -> Generator[str | None, None, None]:
    """Read a number, one of JSON's words, or what is no JSON, up to what cannot be in one."""
    while True:
        found = _AFTER_WORD.search(source.text, source.position)
        end = found.start() if found else len(source.text)
        if end > source.position:
            yield source.take(end - source.position)
        if found or source.ended:
            return
        yield None
