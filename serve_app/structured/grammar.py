"""Grammars as given in requests: their kinds, their bounds, and errors about both. It does not check validity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec

from serve_app.errors import InvalidRequest

MAX_GRAMMAR_BYTES = 64 << 10
"""The maximum size of one grammar, as JSON or text."""
MAX_TOOLS_BYTES = 4 * MAX_GRAMMAR_BYTES
"""The maximum size of the grammar of calls: about half a second of compiling."""
MAX_GRAMMAR_DEPTH = 64
"""The maximum levels of objects, lists and brackets, because grammars are parsed recursively."""
MAX_CHOICES = 1024

_encode = msgspec.json.Encoder().encode


class ToolPart(NamedTuple):
    """A tool's schema of arguments in a larger schema. ``path``: where, as a URI fragment.

    Not ``strict``: if no answer can follow it, its arguments are any JSON object.
    """

    name: str
    path: str
    strict: bool


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on an answer. ``text``: JSON for "json" (a schema) and "choice" (strings), else the grammar itself.

    ``field``: its field in the request, for error messages. Properties are in the schema's order. ``strict``: no part
    of a schema is loosened. ``tools``: the parts of a schema that are tools' own, with other rules.
    """

    kind: Literal["json", "regex", "choice", "grammar"]
    text: str
    field: str
    strict: bool = False
    tools: tuple[ToolPart, ...] = ()

    @classmethod
    def json_schema(
        cls, schema: Mapping[str, Any], field: str, *, strict: bool = False, tools: Sequence[ToolPart] = ()
    ) -> Grammar:
        """Return the grammar of JSON that matches a schema. Raises InvalidRequest if it is too large or deep.

        ``tools``: their schemas have a bounded depth of their own, and a larger size.
        """
        text = _encode(schema).decode()
        if not tools:
            text = _bounded(text, field)
        elif len(text) > MAX_TOOLS_BYTES:
            raise InvalidRequest(
                f"The schemas of tools that must be called have at most {MAX_TOOLS_BYTES} characters without "
                f"descriptions; these have {len(text)}. Send fewer, name those allowed, or use tool_choice auto.",
                param=field,
            )
        return cls("json", text, field, strict, tuple(tools))

    @classmethod
    def json_text(cls, schema: str, field: str) -> Grammar:
        """Return the grammar of a schema given as text. Raises InvalidRequest."""
        try:
            value = msgspec.json.decode(_bounded(schema, field))
        except ValueError as error:
            raise InvalidRequest(f"{field} is not valid JSON ({str(error)[:120]}).", param=field) from error
        if not isinstance(value, dict):
            raise InvalidRequest(f"{field} must be a JSON object.", param=field)
        return cls.json_schema(value, field)

    @classmethod
    def json_object(cls, field: str) -> Grammar:
        """Return the grammar of any JSON object."""
        return cls.json_schema({"type": "object"}, field)

    @classmethod
    def regex(cls, pattern: str, field: str) -> Grammar:
        """Return the grammar of full matches of a regular expression. Raises InvalidRequest."""
        return cls("regex", _bounded(pattern, field), field)

    @classmethod
    def choice(cls, strings: Sequence[str], field: str) -> Grammar:
        """Return the grammar of a choice among strings. Raises InvalidRequest."""
        if not 1 <= len(strings) <= MAX_CHOICES or not all(isinstance(text, str) and text for text in strings):
            raise InvalidRequest(
                f"{field} must be a list of 1 to {MAX_CHOICES} strings that are not empty.", param=field
            )
        return cls("choice", _bounded(_encode(strings).decode(), field, nested=False), field)

    @classmethod
    def context_free(cls, text: str, field: str) -> Grammar:
        """Return a Lark or GBNF (EBNF) grammar. Raises InvalidRequest."""
        return cls("grammar", _bounded(text, field), field)


def _bounded(text: str, field: str, *, nested: bool = True) -> str:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{field} holds a lone surrogate; send valid Unicode.", param=field) from error
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"{field} must have at most {MAX_GRAMMAR_BYTES} bytes; it has {size}.", param=field)
    if nested and _depth(text) > MAX_GRAMMAR_DEPTH:
        raise InvalidRequest(f"{field} must be nested at most {MAX_GRAMMAR_DEPTH} levels deep.", param=field)
    return text


def _depth(text: str) -> int:
    """Return the maximum number of open brackets, including those in strings, which does not affect honest grammars."""
    depth = deepest = 0
    for char in text:
        if char in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in ")]}" and depth:
            depth -= 1
    return deepest
