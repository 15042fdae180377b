"""What grows: values of about ``size`` bytes that a hostile client could send at any place."""

import json
import re
import sys
from collections.abc import Callable
from functools import cache
from itertools import count
from re import _constants, _parser  # type: ignore[attr-defined]
from types import ModuleType
from typing import Any

UNITS = {
    "letters": "a", "digits": "1", "spaces": " ", "line ends": "\n", "returns": "\r\n", "tabs": "\t", "zeros": "\0",
    "quotes": '"', "backslashes": "\\", "stars": "*", "commas": ",", "dots": "../", "percents": "%", "at": "a@1 ",
    "separators": "\x1c", "line separators": "\u2028", "accents": "e\u0301", "marks": "\u0301", "words": "the cat ",
    "emoji": "\U0001f468\u200d\U0001f469", "han": "漢", "brackets": "[", "braces": "{", "tags": "<", "tag": "<a>",
    "ends": "</", "messages": "<|im_start|>user\n", "calls": "<tool_call>", "thoughts": "<think>",
    "reminders": "<system-reminder>", "braced": '{"a":', "events": "data: ", "keys": "wp-", "bearers": "Bearer ",
    "snapshots": "Git snapshot at conversation start.", "billing": "x-anthropic-billing-header: ",
    "definitions": "#/$defs/", "pluses": "(a+)+", "classes": "[a-z]{1,9}", "alternatives": "a|", "groups": "(a|",
    "rules": 'a: "b"\n', "productions": 'a ::= "b"\n',
}  # fmt: skip
"""Texts that repeat one beginning."""


@cache
def beginnings() -> dict[str, str]:
    """Return what each regular expression of ours begins with, of those that begin with letters."""
    found = {}
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or not name.startswith(("serve_app.", "router.")):
            continue
        for value in vars(module).values():
            if isinstance(value, re.Pattern) and isinstance(value.pattern, str):
                begin = ""
                for kind, what in _parser.parse(value.pattern):
                    if kind is not _constants.LITERAL:
                        break
                    begin += chr(what)
                if begin.strip():
                    found[f"beginnings of {value.pattern[:40]}"] = begin
    return found


def texts() -> dict[str, str]:
    """Return the units of growing texts."""
    return UNITS | beginnings()


_number = count()


def text(unit: str, size: int) -> str:
    """Return a text of a repeated unit. Its end differs each time: what is remembered of equal ones does not help."""
    return unit * max(1, size // len(unit.encode())) + str(next(_number))


Shape = Callable[[int, Any], bytes | None]
"""(size, the valid value of the place) -> JSON, None if it has no such shape."""


def _list(item: bytes, size: int) -> bytes:
    return b"[" + b",".join([item] * max(1, size // (len(item) + 1))) + b"]"


def _keys(size: int, inner: bytes = b"1") -> bytes:
    most, begin = max(1, size // (12 + len(inner))), next(_number)  # see ``text``
    return b"{" + b",".join(b'"k%d_%d":%b' % (begin, number, inner) for number in range(most)) + b"}"


def _texts(size: int, _: Any) -> bytes:
    begin = next(_number)  # see ``text``
    return b"[" + b",".join(b'"t%d_%d"' % (begin, number) for number in range(max(1, size // 12))) + b"]"


def _copies(size: int, value: Any) -> bytes | None:
    if isinstance(value, list) and value:
        items = [json.dumps(one).encode() for one in value]
        times = max(1, size // (sum(map(len, items)) + len(items)))
        return b"[" + b",".join(items * times) + b"]"
    return None


def _copies_of_the_last(size: int, value: Any) -> bytes | None:
    return _copies(size, [*value[:-1], *value[-1:] * (2 + size // 80)]) if isinstance(value, list) else None


def _wrapped(size: int, value: Any) -> bytes | None:
    """Return the value inside lists of itself: [[value]]."""
    depth = size // 2
    return b"[" * depth + json.dumps(value).encode() + b"]" * depth


def _more_keys(size: int, value: Any) -> bytes | None:
    if not isinstance(value, dict) or not value:
        return None
    inner = json.dumps(next(iter(value.values()))).encode()
    return json.dumps(value).encode()[:-1] + b"," + _keys(size, inner)[1:]


def _schema(make: Callable[[int], Any]) -> Shape:
    def shape(size: int, value: Any) -> bytes | None:
        if not isinstance(value, dict) or "properties" not in value:
            return None
        schema = make(size)
        begin = b'{"title":"%d",' % next(_number)
        return begin + (schema if isinstance(schema, bytes) else json.dumps(schema).encode())[1:]

    return shape


def _spellings(size: int) -> Any:
    """One definition, named in many spellings."""
    most = max(1, size // 60)
    names = ("".join(f"%{ord(c):02x}" if number >> at & 1 else c for at, c in enumerate("$defs/big-one"))
             for number in range(most))  # fmt: skip
    big = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(size // 60)}}
    return {
        "type": "object",
        "properties": {f"r{number}": {"$ref": f"#/{name}"} for number, name in enumerate(names)},
        "$defs": {"big-one": big},
    }


def _chain(size: int) -> Any:
    most = max(2, size // 40)
    last = {f"d{most}": {"type": "string"}}
    return {
        "$ref": "#/$defs/d0",
        "$defs": {f"d{number}": {"$ref": f"#/$defs/d{number + 1}"} for number in range(most)} | last,
    }


def _doubling(size: int) -> Any:
    """Each definition has the next one twice."""
    most = max(2, size // 90)
    defs: dict[str, Any] = {
        f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"items": {"$ref": f"#/$defs/d{n + 1}"}}]}
        for n in range(most)
    }
    return {"$ref": "#/$defs/d0", "$defs": defs | {f"d{most}": {"type": "string"}}}


def _nested(keyword: str) -> Callable[[int], bytes]:
    def make(size: int) -> bytes:
        begin = b'{"%b":[' % keyword.encode() if keyword.endswith("Of") else b'{"%b":' % keyword.encode()
        end = b"]}" if keyword.endswith("Of") else b"}"
        depth = max(1, size // (len(begin) + len(end)))
        return b'{"properties":{"a":' + begin * depth + b'{"type":"string"}' + end * depth + b"}}"

    return make


def _wide(keyword: str) -> Callable[[int], Any]:
    return lambda size: {
        "type": "object", "properties": {"a": {keyword: [{"maxLength": n} for n in range(size // 20)]}}
    }  # fmt: skip


STRUCTURES: dict[str, Shape] = {
    "nested lists": lambda size, _: b"[" * (size // 2) + b"]" * (size // 2),
    "nested objects": lambda size, _: b'{"a":' * (size // 6) + b"1" + b"}" * (size // 6),
    "the value in lists": _wrapped,
    "many numbers": lambda size, _: _list(b"1", size),
    "many texts": lambda size, _: _list(b'"abcdefg"', size),
    "many different texts": _texts,
    "many lists": lambda size, _: _list(b"[1]", size),
    "many empty objects": lambda size, _: _list(b"{}", size),
    "many keys": lambda size, _: _keys(size),
    "many more keys": _more_keys,
    "many copies": _copies,
    "many copies of the last": _copies_of_the_last,
    "a long number": lambda size, _: b"1" * size,
    "a long fraction": lambda size, _: b"0." + b"1" * size,
    "a long exponent": lambda size, _: b"1e" + b"1" * size,
    "many surrogates": lambda size, _: b'"' + b"\\ud800" * (size // 6) + b'"',
    "spellings of a reference": _schema(_spellings),
    "a chain of references": _schema(_chain),
    "doubling references": _schema(_doubling),
    **{f"nested {word}": _schema(_nested(word)) for word in ("anyOf", "allOf", "oneOf", "not", "items")},
    **{f"wide {word}": _schema(_wide(word)) for word in ("anyOf", "allOf", "oneOf")},
    "a wide enum": _schema(lambda size: {"properties": {"a": {"enum": [f"e{n}" for n in range(size // 8)]}}}),
    "long bounds": _schema(lambda size: {"properties": {"a": {"type": "string", "maxLength": size * 1000}}}),
    "many required": _schema(lambda size: {"type": "object", "required": [f"r{n}" for n in range(size // 8)]}),
    "many patterns": _schema(
        lambda size: {"type": "object", "patternProperties": {f"^p{n}": {} for n in range(size // 12)}}
    ),
}  # fmt: skip


def _text(unit: str) -> Shape:
    return lambda size, _: json.dumps(text(unit, size)).encode()


def shapes() -> dict[str, Shape]:
    """Return every shape."""
    return {**{name: _text(unit) for name, unit in texts().items()}, **STRUCTURES}
