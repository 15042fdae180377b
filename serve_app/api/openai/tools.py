"""Convert OpenAI's ``tools``, ``tool_choice`` and calls to ToolUse and chat-template tools, within bounds."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from pydantic import Field

from serve_app.api.json_body import JsonBody, Must, call_id
from serve_app.api.request import NO_TOOLS, Tool, ToolUse
from serve_app.errors import InvalidRequest

_INDEX = re.compile(r"\[\d+\]")
MAX_TOOLS = 128
MAX_TOOL_VALUES = 1 << 15
"""Values in all tools of a request, nested ones included."""
MAX_TOOL_DEPTH = 32
MAX_ARGUMENT_VALUES = 1 << 17
"""Approximate number of values in the arguments of a conversation's calls; its messages may hold as many besides."""
MAX_ARGUMENT_DEPTH = 64
MAX_DESCRIPTION_CHARS = 1 << 15

FunctionName = Annotated[
    str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$"), Must("1 to 128 letters, digits, dots, dashes and underscores")
]  # fmt: skip
"""Anthropic's limit for all APIs; OpenAI's own is 64, and names of plugins' tools are longer."""
Description = Annotated[
    str | None, Field(max_length=MAX_DESCRIPTION_CHARS), Must(f"a string of at most {MAX_DESCRIPTION_CHARS} characters")
]
Parameters = Annotated[dict[str, Any] | None, Must("an object, the JSON Schema of the arguments")]
FUNCTION = Annotated[Literal["function"], Must('"function": other tools are not supported by this version')]


class FunctionBody(JsonBody):
    """A function that the model may call."""

    name: FunctionName
    description: Description = None
    parameters: Parameters = Field(None, description="the JSON Schema of its arguments")
    strict: bool | None = Field(None, description="enforced where the answer must call; elsewhere without effect")


class ToolBody(JsonBody):
    """A tool of a chat."""

    type: FUNCTION
    function: Annotated[FunctionBody, Must("an object with name, description and parameters")]


Tools = Annotated[
    list[Annotated[ToolBody, Must("an object with type and function")]],
    Field(max_length=MAX_TOOLS),
    Must(f"a list of at most {MAX_TOOLS} tools"),
]


class FunctionChoice(JsonBody):
    """The function that a chat has to call."""

    name: FunctionName


class NamedChoice(JsonBody):
    """A function that has to be called."""

    type: FUNCTION
    function: Annotated[FunctionChoice, Must("an object with name")]


Mode = Annotated[Literal["auto", "required"], Must("auto or required")]


class AllowedTools(JsonBody):
    """The tools that a chat may call, of those that its model sees."""

    mode: Mode
    tools: Annotated[list[NamedChoice], Must("a list of functions")]


class AllowedChoice(JsonBody):
    """Some of the tools may be called, or have to."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedChoice | AllowedChoice,
    Must(
        '"none", "auto", "required", {"type": "function", "function": {"name": "..."}}, '
        'or {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [...]}}'
    ),
]
TOOL_FIELDS = ("tools[].type", "tools[].function", *(f"tools[].function.{name}" for name in FunctionBody.model_fields))


class Function(NamedTuple):
    """A function of any API's body."""

    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None = None

    def for_template(self) -> Tool:
        """Return the function in the form of chat templates; the order of the body's fields does not matter."""
        fields = {field: value for field, value in zip(self._fields[:3], self, strict=False) if value is not None}
        return {"type": "function", "function": fields}


def tool_use(
    functions: Sequence[Function], choice: str, allowed: Sequence[str] | None = None, *, parallel: bool = True
) -> ToolUse:
    """Return a request's tool use. ``choice``: none, auto or required; ``allowed``: who may be called, None: all."""
    names = [function.name for function in functions]
    if unknown := [name for name in allowed or () if name not in names]:
        raise InvalidRequest(f"tool_choice names {unknown[0]!r}, which is not among tools.", param="tool_choice")
    if choice == "required" and not (names if allowed is None else allowed):
        raise InvalidRequest('tool_choice "required" needs tools.', param="tool_choice")
    if not functions:
        return NO_TOOLS
    if len(set(names)) < len(names):
        raise InvalidRequest("tools must have names that differ.", param="tools")
    for values, depth in enumerate(_depths([function.parameters for function in functions])):
        if depth > MAX_TOOL_DEPTH or values > MAX_TOOL_VALUES:
            bounds = f"{MAX_TOOL_VALUES} values, nested at most {MAX_TOOL_DEPTH} deep"
            raise InvalidRequest(f"tools must hold at most {bounds}.", param="tools")
    return ToolUse(
        tools=tuple(function.for_template() for function in functions),
        may_call=choice != "none" and (allowed is None or bool(allowed)),
        must_call=choice == "required",
        allowed=frozenset(allowed or ()),
        parallel=parallel,
        strict=frozenset(function.name for function in functions if function.strict),
    )


def _depths(root: Any) -> Iterator[int]:
    """Yield the depth of each value, without recursion, which a client could exhaust."""
    left = [(root, 0)]
    while left:
        value, depth = left.pop()
        yield depth
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        left.extend((one, depth + 1) for one in inner)


def check_arguments(functions: Iterable[Any]) -> None:
    """Refuse calls with too many values in their arguments, which are JSON in strings, before parsing any."""
    texts = (function.get("arguments") for function in functions if isinstance(function, dict))
    if sum(text.count(mark) for text in texts if isinstance(text, str) for mark in ",[{") > MAX_ARGUMENT_VALUES:
        raise InvalidRequest(
            f"The arguments of all calls hold over {MAX_ARGUMENT_VALUES} values; leave the oldest out.",
            param="arguments",
        )


def too_deep(arguments: Any) -> bool:
    """Return whether a call's arguments are nested too deep for templates, which read them recursively."""
    return any(depth > MAX_ARGUMENT_DEPTH for depth in _depths(arguments))


_CALL_FIELDS = frozenset({"id", "type", "function", "custom", "index"})


def call_for_template(call: Any, path: str, ignored: set[str]) -> dict[str, Any]:
    """Return one of a message's ``tool_calls`` in the form of chat templates. See ``called``."""
    custom = call.get("custom") if isinstance(call, dict) and call.get("type") == "custom" else None
    if isinstance(custom, dict):
        call = {**call, "type": "function", "function": with_input(custom)}
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        example = '{"id": "...", "type": "function", "function": {"name": "...", "arguments": "{...}"}}'
        raise InvalidRequest(f"{path} must be a call like {example}.", param=path)
    if len(call) > 3 or len(function) > 2:
        where = _INDEX.sub("[]", path)
        ignored.update(f"{where}.{name}" for name in call.keys() - _CALL_FIELDS if call[name] is not None)
        unread = (name for name in function.keys() - {"name", "arguments"} if function[name] is not None)
        ignored.update(f"{where}.function.{name}" for name in unread)
    written = {"type": "function", "function": called(function, f"{path}.function", ignored)}
    return {"id": call_id(call["id"], f"{path}.id"), **written} if call.get("id") else written


def with_input(custom: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call of a custom tool, whose input is free text, as that of a function."""
    return {"name": custom.get("name"), "arguments": {"input": custom.get("input") or ""}}


def called(function: dict[str, Any], path: str, ignored: set[str]) -> dict[str, Any]:
    """Return a call's name, and its arguments as an object. Raises InvalidRequest.

    Arguments that are no JSON object, as of a call that ``max_tokens`` cut off, become {} (as in vLLM), and their path
    is added to ``ignored``: a client cannot repair its history.
    """
    name, arguments = function.get("name"), function.get("arguments") or "{}"
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{path}.name must be a string that is not empty.", param=f"{path}.name")
    read = arguments
    if isinstance(arguments, str):
        try:
            read = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
            read = None
    if not isinstance(read, dict):
        ignored.add(f"{_INDEX.sub('[]', path)}.arguments")
        read = {}
    if too_deep(read):
        most = f"nested at most {MAX_ARGUMENT_DEPTH} deep"
        raise InvalidRequest(f"{path}.arguments must be {most}.", param=f"{path}.arguments")
    return {"name": name, "arguments": read}
