"""Tool call formats of model families, an entry of ``FORMATS`` each. Source of the names: vLLM.

An answer that must call is a JSON list of calls in every family.
"""

import re
import secrets
import string
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from serve_app.api.format import CallBegun
from serve_app.api.request import Tool, ToolUse
from serve_app.generation.tool_calls.marked import ArgumentMarks, Marks, read_marked
from serve_app.generation.tool_calls.source import MakeId, Source, Steps, json_call, stream_arguments
from serve_app.structured.grammar import Grammar, ToolPart
from serve_app.structured.schema import without_texts

Reading = Callable[[Source, MakeId, Mapping[str, Any]], Steps[None]]
"""(text, ids for calls, schemas of the tools' arguments by name) -> text to show and calls."""

HERMES_OPENS, HERMES_CLOSES = "<tool_call>", "</tool_call>"
LLAMA3_OPENS = "<|python_tag|>"
MISTRAL_OPENS, MISTRAL_ID, MISTRAL_ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
PHI4_OPENS, PHI4_CLOSES = "<|tool_call|>", "<|/tool_call|>"
_NOT_IN_NAME = re.compile(r"[^\w.-]")


def hermes(source: Source, make_id: MakeId, tools: Mapping[str, Any]) -> Steps[None]:
    """Read ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Hermes and Qwen write it."""
    return _json_between((HERMES_OPENS,), HERMES_CLOSES, source, make_id)


def granite(source: Source, make_id: MakeId, tools: Mapping[str, Any]) -> Steps[None]:
    """Read ``<|tool_call|>[{"name": ..., "arguments": {...}}, ...]``, as Granite 3 and Phi 4 write it."""
    return _json_between((PHI4_OPENS, HERMES_OPENS), PHI4_CLOSES, source, make_id)


def _json_between(opens: tuple[str, ...], closes: str, source: Source, make_id: MakeId) -> Steps[None]:
    while (yield from source.text_before(*opens)):
        if (yield from source.spaces()) == "[":
            yield from _list(source, make_id)
        else:
            called = yield from json_call(source, make_id)
            if called:
                yield source.call_ended()
            elif called is not None:
                yield source.raw
                continue
        yield from source.spaces()
        if (yield from source.accept(closes)):
            yield from source.spaces()


def llama3_json(source: Source, make_id: MakeId, tools: Mapping[str, Any]) -> Steps[None]:
    """Read a tool's ``{"name": ..., "parameters": {...}}`` as whole answer or after its mark; more after ``;``."""
    source.mark()
    if (yield from source.spaces()) == "{":
        yield from _objects(source, make_id, tools, ";")
    else:
        yield source.raw
    while (yield from source.text_before(LLAMA3_OPENS)):
        source.mark()
        yield from source.spaces()
        yield from _objects(source, make_id, tools, ";")


def mistral(source: Source, make_id: MakeId, tools: Mapping[str, Any]) -> Steps[None]:
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


def json_list(source: Source, make_id: MakeId, tools: Mapping[str, Any]) -> Steps[None]:
    """Read ``[{"name": ..., "parameters": {...}}, ...]``, the form of answers that must call."""
    source.mark()
    if (yield from source.spaces()) == "[":
        yield from _list(source, make_id)
    elif not source.cut_here:
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


def _objects(source: Source, make_id: MakeId, names: Collection[str] | None, between: str) -> Steps[None]:
    """Read consecutive calls; the text of an object that is not a call is shown."""
    while True:
        called = yield from json_call(source, make_id, names)
        if not called:
            if called is not None:
                yield source.raw
            return
        yield source.call_ended()
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
    named = yield from source.accept(MISTRAL_ARGUMENTS)
    opened = bool(name) and (yield from source.spaces()) == "{"
    if not opened and not source.cut_here:
        yield source.raw.replace(MISTRAL_ID, "").replace(MISTRAL_ARGUMENTS, "")
    if not opened and not (named and source.cut_here):
        return
    yield CallBegun(make_id(name), name)
    if opened:
        yield from stream_arguments(source)
    yield source.call_ended()
    yield from source.spaces()


def _name(source: Source) -> Steps[str]:
    parts: list[str] = []
    while (yield from source.peek()):
        match = _NOT_IN_NAME.search(source.text, source.position)
        end = match.start() if match else len(source.text)
        parts.append(source.take(end - source.position))
        if match:
            break
    return "".join(parts)


def call_id(name: str, earlier: int) -> str:
    """Return a new call's id."""
    return "call_" + secrets.token_hex(12)


def _mistral_id(name: str, earlier: int) -> str:
    """Return nine characters: Mistral's templates refuse other ids. Source: mistral-common."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


def _kimi_id(name: str, earlier: int) -> str:
    """Return the id that Kimi's models write themselves; their template shows it in the name's place."""
    return f"functions.{name}:{earlier}"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One family's format. ``shown``: special tokens in its text. ``make_id``: by name and number of earlier calls.

    ``hinted``: whether (a template, special tokens) that write no calls hint at it.
    """

    reading: Reading
    shown: frozenset[str] = frozenset()
    make_id: Callable[[str, int], str] = call_id
    hinted: Callable[[str, frozenset[str]], bool] = lambda template, special_tokens: False


def _marked(marks: Marks, make_id: Callable[[str, int], str] = call_id, hint: str = "") -> ToolFormat:
    return ToolFormat(partial(read_marked, marks), marks.all, make_id, lambda _, special_tokens: hint in special_tokens)


_DEEPSEEK = Marks(
    opens="<｜tool▁calls▁begin｜>",
    begin="<｜tool▁call▁begin｜>",
    named="<｜tool▁sep｜>",
    ends=("<｜tool▁call▁end｜>",),
    closes="<｜tool▁calls▁end｜>",
    special=True,
)
FORMATS = {
    "hermes": ToolFormat(
        hermes,
        frozenset({HERMES_OPENS, HERMES_CLOSES}),
        hinted=lambda template, _: HERMES_OPENS in template and not re.search("<function=|<arg_key>", template),
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
        hinted=lambda template, special_tokens: (
            '"parameters"' in template and (LLAMA3_OPENS in special_tokens or "python_tag" in template)
        ),
    ),
    "qwen3_coder": _marked(
        Marks(
            HERMES_OPENS,
            "<function=",
            ">",
            ("</function>",),
            HERMES_CLOSES,
            ArgumentMarks("<parameter=", ">", "</parameter>", pad="\n"),
        )
    ),
    "glm45": _marked(
        Marks(
            HERMES_OPENS,
            ends=(HERMES_CLOSES,),
            keys=ArgumentMarks("<arg_key>", "</arg_key>", "</arg_value>", "<arg_value>"),
        )
    ),
    "kimi_k2": _marked(
        Marks(
            "<|tool_calls_section_begin|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            ("<|tool_call_end|>",),
            "<|tool_calls_section_end|>",
            names_id=True,
            special=True,
        ),
        _kimi_id,
        "<|tool_calls_section_begin|>",
    ),
    "deepseek_v3": _marked(
        replace(
            _DEEPSEEK,
            begin=_DEEPSEEK.begin + "function" + _DEEPSEEK.named,
            named="```json",
            ends=("```", *_DEEPSEEK.ends),
            parts=_DEEPSEEK.all,
        )
    ),
    "deepseek_v31": _marked(_DEEPSEEK),
    "minimax_m2": _marked(
        Marks(
            "<minimax:tool_call>",
            '<invoke name="',
            '">',
            ("</invoke>",),
            "</minimax:tool_call>",
            ArgumentMarks('<parameter name="', '">', "</parameter>"),
        )
    ),
    "seed_oss": _marked(
        Marks(
            "<seed:tool_call>",
            "<function=",
            ">",
            ("</function>",),
            "</seed:tool_call>",
            ArgumentMarks("<parameter=", ">", "</parameter>"),
        )
    ),
    "minicpm5": _marked(
        Marks(
            begin='<function name="',
            named='">',
            ends=("</function>",),
            keys=ArgumentMarks('<param name="', '">', "</param>", cdata=True),
        )
    ),
    "granite": ToolFormat(granite, frozenset({PHI4_OPENS, HERMES_OPENS, HERMES_CLOSES})),
    "phi4_mini_json": ToolFormat(
        granite, frozenset({PHI4_OPENS, PHI4_CLOSES}), hinted=lambda _, special_tokens: PHI4_CLOSES in special_tokens
    ),
}
"""By their names in the setting ``tool_parser``, which are vLLM's."""


def forced_calls(use: ToolUse) -> Grammar:
    """Return the grammar of an answer that must call. Raises InvalidRequest if the tools are too large."""
    tools = [tool for tool in use.tools if not use.allowed or tool["function"]["name"] in use.allowed]
    one = len(tools) == 1
    pointers = ["#/items" if one else f"#/items/anyOf/{index}" for index in range(len(tools))]
    calls = [_call(tool, pointer) for tool, pointer in zip(tools, pointers, strict=True)]
    items = calls[0] if one else {"anyOf": calls}
    schema = {"type": "array", "items": items, "minItems": 1}
    names = [tool["function"]["name"] for tool in tools]
    parts = [ToolPart(n, f"{p}/properties/parameters", n in use.strict) for n, p in zip(names, pointers, strict=True)]
    return Grammar.json_schema(schema if use.parallel else {**schema, "maxItems": 1}, "tools", tools=parts)


def _call(tool: Tool, pointer: str) -> dict[str, Any]:
    """Return the schema of a call; ``pointer``: its location in the whole, for references inside the tool's own."""
    function = tool["function"]
    parameters = _moved(without_texts(function.get("parameters", {})), f"{pointer}/properties/parameters")
    parameters.pop("$id", None)  # the references no longer start there
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "parameters": {**parameters, "type": "object"}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _moved(schema: Any, pointer: str) -> Any:
    """Return a schema with its references to itself adjusted to another place in a larger schema."""
    if isinstance(schema, list):
        return [_moved(part, pointer) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: pointer + part[1:]
        if name == "$ref" and isinstance(part, str) and part[:1] == "#"
        else _moved(part, pointer)
        for name, part in schema.items()
    }
