"""Tool call formats of model families: a grammar and an entry of ``FORMATS`` each. Source: vLLM's parsers and names.

An answer that must call is a JSON list of calls in every family.
"""

import re
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from serve_app.api.request import Tool, ToolUse
from serve_app.api.tool_calls import CallBegun, CallEnded
from serve_app.generation.tool_calls.source import MakeId, Source, Steps, json_call, stream_arguments
from serve_app.structured.grammar import Grammar

Reading = Callable[[Source, MakeId, frozenset[str]], Steps[None]]
"""(text, ids for calls, names of the tools) -> text to show and calls."""

HERMES_OPENS, HERMES_CLOSES = "<tool_call>", "</tool_call>"
LLAMA3_OPENS = "<|python_tag|>"
MISTRAL_OPENS, MISTRAL_ID, MISTRAL_ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NOT_IN_NAME = re.compile(r"[^\w.-]")
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""llguidance's options: with flexible white space, a model that is forced to call can generate it forever."""


def hermes(source: Source, make_id: MakeId, names: frozenset[str]) -> Steps[None]:
    """Read ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Hermes and Qwen write it."""
    while (yield from source.text_before(HERMES_OPENS)):
        source.mark(HERMES_OPENS)
        yield from source.spaces()
        if not (yield from json_call(source, make_id)):
            yield source.raw
            continue
        yield CallEnded(source.raw)
        yield from source.spaces()
        if (yield from source.accept(HERMES_CLOSES)):
            yield from source.spaces()


def llama3_json(source: Source, make_id: MakeId, names: frozenset[str]) -> Steps[None]:
    """Read a tool's ``{"name": ..., "parameters": {...}}`` as whole answer or after its mark; more after ``;``."""
    source.mark()
    if (yield from source.spaces()) == "{":
        yield from _objects(source, make_id, names, ";")
    else:
        yield source.raw
    while (yield from source.text_before(LLAMA3_OPENS)):
        source.mark()
        yield from source.spaces()
        yield from _objects(source, make_id, names, ";")


def mistral(source: Source, make_id: MakeId, names: frozenset[str]) -> Steps[None]:
    """Read ``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`` or ``[TOOL_CALLS]name[ARGS]{...}``, repeated."""
    while (yield from source.text_before(MISTRAL_OPENS)):
        source.mark()
        after = yield from source.spaces()
        if after == "[":
            yield from _list(source, make_id)
        elif after == "{":
            yield from _objects(source, make_id, None, ",")
        else:
            yield from _named(source, make_id)


def json_list(source: Source, make_id: MakeId, names: frozenset[str]) -> Steps[None]:
    """Read ``[{"name": ..., "parameters": {...}}, ...]``, the form of answers that must call."""
    source.mark()
    if (yield from source.spaces()) == "[":
        yield from _list(source, make_id)
    else:
        yield source.raw
    while (yield from source.peek()):
        source.mark()
        yield source.take(len(source.text) - source.position)


def _list(source: Source, make_id: MakeId) -> Steps[None]:
    """Read calls between brackets, from the opening one on."""
    source.take(1)
    yield from source.spaces()
    yield from _objects(source, make_id, None, ",")
    if (yield from source.accept("]")):
        yield from source.spaces()


def _objects(source: Source, make_id: MakeId, names: frozenset[str] | None, between: str) -> Steps[None]:
    """Read consecutive calls; the text of an object that is not a call is shown."""
    while True:
        if not (yield from json_call(source, make_id, names)):
            yield source.raw
            return
        yield CallEnded(source.raw)
        source.mark()
        if (yield from source.spaces()) == between:
            source.take(1)
            yield from source.spaces()
        if (yield from source.peek()) != "{":
            return


def _named(source: Source, make_id: MakeId) -> Steps[None]:
    """Read ``name[ARGS]{...}``, where ``[ARGS]`` or an id before it may be missing."""
    name = yield from _name(source)
    if name and (yield from source.accept(MISTRAL_ID)):
        yield from _name(source)
    yield from source.accept(MISTRAL_ARGUMENTS)
    if not name or (yield from source.spaces()) != "{":
        yield source.raw.replace(MISTRAL_ID, "").replace(MISTRAL_ARGUMENTS, "")
        return
    yield CallBegun(make_id(), name)
    yield from stream_arguments(source)
    yield CallEnded(source.raw)
    yield from source.spaces()


def _name(source: Source) -> Steps[str]:
    parts: list[str] = []
    while (yield from source.peek()):
        found = _NOT_IN_NAME.search(source.text, source.position)
        end = found.start() if found else len(source.text)
        parts.append(source.take(end - source.position))
        if found:
            break
    return "".join(parts)


def call_id() -> str:
    """Return a new call's id."""
    return "call_" + secrets.token_hex(12)


def _mistral_id() -> str:
    """Return nine characters: Mistral's templates refuse other ids. Source: mistral-common."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One family's format. ``shown``: special tokens in its text. ``asked_for``: whether a template asks for it."""

    grammar: Reading
    shown: frozenset[str] = frozenset()
    make_id: MakeId = call_id
    asked_for: Callable[[str, frozenset[str]], bool] = lambda template, special_tokens: False


FORMATS = {
    "hermes": ToolFormat(
        hermes,
        frozenset({HERMES_OPENS, HERMES_CLOSES}),
        asked_for=lambda template, special_tokens: HERMES_OPENS in template,
    ),
    "mistral": ToolFormat(
        mistral,
        frozenset({MISTRAL_OPENS, MISTRAL_ID, MISTRAL_ARGUMENTS}),
        _mistral_id,
        lambda template, special_tokens: MISTRAL_OPENS in template or MISTRAL_OPENS in special_tokens,
    ),
    "llama3_json": ToolFormat(
        llama3_json,
        frozenset({LLAMA3_OPENS}),
        asked_for=lambda template, special_tokens: (
            '"parameters"' in template and (LLAMA3_OPENS in special_tokens or "python_tag" in template)
        ),
    ),
}
"""By their names in the setting ``tool_parser``; if a template asks for two, the first counts."""


def find_format(template: str, special_tokens: frozenset[str]) -> str | None:
    """Return the name of the format that a chat template requests from its model, None if it is none of these."""
    # XML in <tool_call> is another format.
    if HERMES_OPENS in template and "<function=" in template:
        return None
    return next((name for name, each in FORMATS.items() if each.asked_for(template, special_tokens)), None)


def forced_calls(use: ToolUse) -> Grammar:
    """Return the grammar of an answer that must call. Raises InvalidRequest if the tools are too large."""
    tools = [tool for tool in use.tools if not use.allowed or tool["function"]["name"] in use.allowed]
    one = len(tools) == 1
    calls = [_call(tool, "#/items" if one else f"#/items/anyOf/{index}") for index, tool in enumerate(tools)]
    items = calls[0] if one else {"anyOf": calls}
    schema = {"x-guidance": _LAYOUT, "type": "array", "items": items, "minItems": 1}
    return Grammar.json_schema(schema if use.parallel else {**schema, "maxItems": 1}, "tools")


def _call(tool: Tool, place: str) -> dict[str, Any]:
    """Return the schema of a call; ``place``: its location in the whole, for references inside the tool's own."""
    function = tool["function"]
    parameters = _moved(function.get("parameters", {}), f"{place}/properties/parameters")
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "parameters": {**parameters, "type": "object"}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str) -> Any:
    """Return a schema with its references to itself adjusted to another place in a larger schema."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: place + part[1:] if name == "$ref" and isinstance(part, str) and part[:1] == "#" else _moved(part, place)
        for name, part in schema.items()
    }
