"""Read calls that a family writes between marks: a name, then JSON, or keys with values. A family is a row of marks."""

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from serve_app.api.format import CallArguments, CallBegun
from serve_app.generation.tool_calls.source import MakeId, Source, Steps, stream_arguments
from serve_app.structured.schema import type_of

_NAME = re.compile(r"[\w.:-]*")
_ID = re.compile(r"(?:functions\.)?(?P<name>.+?)(?::\d+)?")
"""Kimi's id of a call, which holds its name."""
MAX_LITERAL_CHARS = 1 << 16
"""A longer value is not tried as Python's literal."""


@dataclass(frozen=True, slots=True)
class ArgumentMarks:
    """Marks of an argument: before its key, behind it, and behind its value. ``value``: one more before the value.

    ``pad``: white space that the family puts around each value. ``cdata``: strings may stand in ``<![CDATA[...]]>``.
    """

    begin: str
    keyed: str
    end: str
    value: str = ""
    pad: str = ""
    cdata: bool = False


@dataclass(frozen=True, slots=True)
class Marks:
    """Marks of a call: before its name, behind it, and behind its arguments. "": there is none.

    ``opens``, ``closes``: around all calls. ``keys``: None if the arguments are JSON. ``names_id``: an id stands in the
    name's place. ``special``: the marks are special tokens, which no text shows; ``parts``: those within other marks.
    """

    opens: str = ""
    begin: str = ""
    named: str = ""
    ends: tuple[str, ...] = ()
    closes: str = ""
    keys: ArgumentMarks | None = None
    names_id: bool = False
    special: bool = False
    parts: frozenset[str] = frozenset()

    @property
    def all(self) -> frozenset[str]:
        """All marks."""
        keys = (self.keys.begin, self.keys.keyed, self.keys.end, self.keys.value) if self.keys else ()
        return frozenset({self.opens, self.begin, self.named, *self.ends, self.closes, *keys, *self.parts} - {""})

    @property
    def openers(self) -> tuple[str, ...]:
        """Marks that begin calls; models leave out the one around all."""
        return tuple(filter(None, (self.opens, self.begin)))

    @property
    def strays(self) -> tuple[str, ...]:
        """Special tokens that are left out where they stand alone."""
        return tuple(mark for mark in (self.named, *self.ends, self.closes) if self.special and mark[:1] == "<")

    def shown(self, raw: str) -> str:
        """Return the text of something that is no call."""
        for mark in sorted(self.all, key=len, reverse=True) if self.special else ():
            raw = raw.replace(mark, "")
        return raw


def read_marked(marks: Marks, source: Source, make_id: MakeId, tools: Mapping[str, Any]) -> Steps[None]:
    """Read text and calls. ``tools``: the schemas of their arguments, by name."""
    while found := (yield from source.text_before(*marks.openers, *marks.strays)):
        if found in marks.strays:
            continue
        begun = found == marks.begin
        while True:
            if not begun:
                yield from source.spaces()
                begun = yield from source.accept(marks.begin)
            called = (yield from _call(marks, source, make_id, tools)) if begun else False
            if not called:
                if not source.cut_here:
                    yield marks.shown(source.raw)
                break
            yield source.call_ended(marks.shown(source.raw))
            source.mark()
            yield from source.spaces()
            if marks.closes and (yield from source.accept(marks.closes)):
                yield from source.spaces()
                break
            begun = bool(marks.begin) and (yield from source.accept(marks.begin))
            if not begun:
                break


def _call(marks: Marks, source: Source, make_id: MakeId, tools: Mapping[str, Any]) -> Steps[bool]:
    """Read a call from its name on; return whether one has begun. If not, none of the text read was shown.

    One that was cut begins once the mark behind its name is there.
    """
    yield from source.spaces()
    name, call_id = (yield from _name(source)), ""
    if marks.names_id:
        found = _ID.fullmatch(name)
        name, call_id = (found["name"], name) if found and found["name"] in tools else ("", "")
    yield from source.spaces()
    if not name or not (yield from source.accept(marks.named)):
        return False
    after = yield from source.spaces()
    if marks.keys is None:
        if after != "{" and not source.cut_here:
            return False
        yield CallBegun(call_id or make_id(name), name)
        if after == "{":
            yield from stream_arguments(source)
        for mark in marks.ends:
            yield from source.spaces()
            yield from source.accept(mark)
        return True
    separator, end, key = "{", marks.ends[0], marks.keys
    following = tuple(filter(None, (key.begin, end, marks.closes)))
    if not (yield from source.next_is(*following)):
        return False
    begun = False
    while (yield from source.accept(key.begin)):
        word = yield from _text(source, key.keyed)
        if word is None:
            break
        if not begun:
            begun = True
            yield CallBegun(make_id(name), name)
        word = word.strip()
        yield CallArguments(f"{separator}{json.dumps(word, ensure_ascii=False)}: ")
        separator = ", "
        if key.value:
            yield from source.spaces()
            yield from source.accept(key.value)
        form, types = key, _types_of(tools.get(name), word)
        if key.cdata and (yield from source.accept("<![CDATA[")):
            form, types = replace(key, end="]]>" + key.end), frozenset({"string"})
        yield from _value(source, form, following, types)
        yield from source.spaces()
    closed = (yield from source.accept(end)) or (bool(marks.closes) and (yield from source.accept(marks.closes)))
    if (closed or source.cut_here) and not begun and (marks.named or (name in tools and not _may_go_on(name, tools))):
        begun = True
        yield CallBegun(make_id(name), name)
    if closed and begun:
        yield CallArguments("{}" if separator == "{" else "}")
    return begun


def _may_go_on(name: str, tools: Mapping[str, Any]) -> bool:
    """Return whether a tool's name goes on where another one ends."""
    return any(other.startswith(name) for other in tools if other != name)


def _name(source: Source) -> Steps[str]:
    parts: list[str] = []
    while (yield from source.peek()):
        found = _NAME.match(source.text, source.position)
        end = found.end() if found else source.position
        parts.append(source.take(end - source.position))
        if source.position < len(source.text):
            break
    return "".join(parts)


def _text(source: Source, mark: str) -> Steps[str | None]:
    """Read a text and the mark behind it; None if the mark is missing."""
    steps = source.until(mark, marks=True)
    parts: list[str] = []
    while True:
        try:
            part = next(steps)
        except StopIteration as end:
            return "".join(parts) if end.value else None
        if part is None:
            yield None
        else:
            parts.append(part)


def _value(source: Source, key: ArgumentMarks, following: tuple[str, ...], types: frozenset[str]) -> Steps[None]:
    """Read a value and the mark behind it; yield its JSON, a string's as it arrives. One that is cut has no end.

    A mark is part of the value unless one of ``following`` comes behind it.
    """
    streamed = types == {"string"}
    parts: list[str] = []
    if streamed:
        yield CallArguments('"')
    first, pending = True, ""
    steps = source.until(key.end, marks=True)
    while True:
        try:
            part = next(steps)
            if part is None:
                yield None
                continue
        except StopIteration as end:
            if not end.value:
                return
            if (yield from source.next_is(*following)):
                break
            part, steps = key.end, source.until(key.end, marks=True)
        if first:
            first, part = False, part.removeprefix(key.pad)
        part, pending = pending + part, ""
        if key.pad and part.endswith(key.pad):
            part, pending = part.removesuffix(key.pad), key.pad
        if streamed and part:
            yield CallArguments(json.dumps(part, ensure_ascii=False)[1:-1])
        parts.append(part)
    yield CallArguments('"' if streamed else json_of("".join(parts), types))


def json_of(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value that is written without quotes. ``types``: those of its schema, none if unknown.

    Templates write values that are no strings as JSON or in Python's way, such as ``True``.
    """
    bare = text.strip()
    if types != {"string"}:
        try:
            value = msgspec.json.decode(bare)
        except (msgspec.DecodeError, RecursionError):
            value, bare = _literal(bare)
        else:
            value = text if isinstance(value, str) else value
        if not isinstance(value, str) and (not types or "string" not in types or type_of(value) in types):
            return bare
    return json.dumps(text, ensure_ascii=False)


def _literal(text: str) -> tuple[Any, str]:
    """Return the value of a Python literal and its JSON; the text itself if it is none."""
    if len(text) <= MAX_LITERAL_CHARS:
        try:
            value = ast.literal_eval(text)
            return value, json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            pass
    return text, text


def _types_of(schema: Any, key: str) -> frozenset[str]:
    """Return the types that an argument's schema allows, as far as it tells them. It may refer to itself."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    left, seen, found = [properties.get(key) if isinstance(properties, dict) else None], set[int](), set[str]()
    while left:
        each = left.pop()
        if not isinstance(each, dict) or id(each) in seen:
            continue
        seen.add(id(each))
        kind = each.get("type")
        values = each["enum"] if "enum" in each else [each["const"]] if "const" in each else None
        if kind:
            words = [kind] if isinstance(kind, str) else kind if isinstance(kind, list) else []
            found.update("number" if word == "integer" else str(word) for word in words)
        elif isinstance(values, list):
            found.update(map(type_of, values))
        else:
            for word in ("anyOf", "oneOf", "allOf"):
                left += each[word] if isinstance(each.get(word), list) else []
            left.append(_referred(schema, each.get("$ref")))
    return frozenset(found)


def _referred(root: Any, pointer: Any) -> Any:
    """Return the schema that a reference within ``root`` names, None if there is none."""
    if not isinstance(pointer, str) or not pointer.startswith("#/"):
        return None
    for part in pointer[2:].split("/"):
        root = root.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(root, dict) else None
    return root
