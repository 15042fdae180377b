"""A request's tools, within bounds, become the form of chat templates, or a 400 that names the mistake."""

import json
from typing import Any

import pytest

from serve_app.api.openai.responses.request import messages_of
from serve_app.api.openai.tools import MAX_ARGUMENT_DEPTH, MAX_TOOL_DEPTH, MAX_TOOLS
from serve_app.api.request import NO_TOOLS, ToolUse
from serve_app.errors import InvalidRequest
from tests.serve_app.api.openai.bodies import assert_refused, chat

PARAMETERS = {"type": "object", "properties": {"q": {"type": "string"}}}
SEARCH = {"type": "function", "function": {"name": "search", "description": "Looks.", "parameters": PARAMETERS}}
NAMED = {"type": "function", "function": {"name": "search"}}


def allowed(mode: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_tools_arrive_as_templates_read_them() -> None:
    """Equal tools are equal in any order of fields; fields without effect on the prompt are left out."""
    function = {"strict": True, "parameters": PARAMETERS, "description": "Looks.", "name": "search"}
    turned = {"function": function, "type": "function"}
    use = chat(tools=[turned]).tool_use
    assert chat(tools=[SEARCH]).tool_use == ToolUse(tools=(SEARCH,))
    assert use == ToolUse(tools=(SEARCH,), strict=frozenset({"search"}))
    assert json.dumps(use.tools) == json.dumps([SEARCH])
    assert chat(tools=[NAMED]).tool_use.tools == (NAMED,)
    assert chat(tools=[]).tool_use == chat(tools=None).tool_use == NO_TOOLS


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"tool_choice": "auto"}, {}),
        ({"tool_choice": "none"}, {"may_call": False}),
        ({"tool_choice": "required"}, {"must_call": True}),
        ({"tool_choice": NAMED}, {"must_call": True, "allowed": frozenset({"search"}), "parallel": False}),
        ({"tool_choice": allowed("auto", NAMED)}, {"allowed": frozenset({"search"})}),
        ({"tool_choice": allowed("required", NAMED)}, {"must_call": True, "allowed": frozenset({"search"})}),
        ({"tool_choice": allowed("auto")}, {"may_call": False}),
        ({"parallel_tool_calls": False}, {"parallel": False}),
    ],
)
def test_a_choice_sets_the_allowed_calls(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    """Every choice leaves the tools in the prompt, so that its KV is the same; without tools it has no effect."""
    assert chat(tools=[SEARCH], **fields).tool_use == ToolUse(tools=(SEARCH,), **expected)
    assert "must_call" in expected or "allowed" in expected or chat(**fields) == chat()


DEEP = '{"a": ' * (MAX_ARGUMENT_DEPTH + 1) + "{}" + "}" * (MAX_ARGUMENT_DEPTH + 1)
DEEP_SCHEMA = json.loads('{"items": ' * MAX_TOOL_DEPTH + "{}" + "}" * MAX_TOOL_DEPTH)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [SEARCH] * (MAX_TOOLS + 1)}, "tools", "list of at most 128"),
        ({"tools": [SEARCH, SEARCH]}, "tools", "names that differ"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "other tools are not supported"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "1 to 128"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
         "tools[0].function.parameters", "JSON Schema"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": DEEP_SCHEMA}}]},
         "tools", "nested at most"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"enum": [1] * 40_000}}}]},
         "tools", "over 32768 values"),
        ({"tools": [SEARCH], "tool_choice": "always"}, "tool_choice", '"required"'),
        ({"tools": [{"type": "function", "function": {"name": "find"}}], "tool_choice": NAMED},
         "tool_choice", "'search'"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [SEARCH], "tool_choice": allowed("required")}, "tool_choice", "needs tools"),
        ({"tools": [{"type": "function", "function": {"name": "find"}}], "tool_choice": allowed("auto", NAMED)},
         "tool_choice", "'search'"),
        ({"tools": [SEARCH], "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "allowed_tools"),
        ({"tool_choice": NAMED}, "tool_choice", "not among tools"),
        ({"tools": [SEARCH], "apply_chat_template": False}, "tools", "apply_chat_template"),
        ({"functions": [{"name": "f"}]}, "functions", "use tools"),
        ({"function_call": {"name": "f"}}, "function_call", "use tool_choice"),
        *(({"messages": [{"role": "assistant", **message}]}, f"messages[0].{param}", "")
          for message, param in (
            ({"tool_calls": {}}, "tool_calls"),
            ({"tool_calls": [{"type": "custom", "function": {}}]}, "tool_calls[0]"),
            ({"tool_calls": [{"function": {"arguments": "{}"}}]}, "tool_calls[0].function.name"),
            ({"tool_calls": [{"function": {"name": "f", "arguments": DEEP}}]}, "tool_calls[0].function.arguments"),
            ({"tool_calls": [{"id": 3, "function": {"name": "f"}}]}, "tool_calls[0].id"),
            ({"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}, "tool_calls"),
            ({"function_call": {"arguments": "{}"}}, "function_call.function.name"),
            ({"role": "user", "content": "x", "function_call": {"name": "f"}}, "function_call"),
          )),
    ],
)  # fmt: skip
def test_an_invalid_tool_or_call_is_a_400(fields: dict[str, Any], param: str, words: str) -> None:
    assert_refused(chat, fields, param, words)


def test_unknown_fields_of_tools_are_named() -> None:
    request = chat(tools=[{**SEARCH, "cache_control": {}, "function": {**SEARCH["function"], "paramters": {}}}])
    assert [field.with_meaning for field in request.unknown] == [
        "tools[].cache_control",
        "tools[].function.paramters (did you mean tools[].function.parameters?)",
    ]


def test_calls_in_messages_have_objects_for_arguments() -> None:
    """Clients send back a call and its result; the assistant may have no text."""

    def calls(with_arguments: Any, without: Any) -> list[Any]:
        named = [{"name": "search", "arguments": with_arguments}, {"name": "search", "arguments": without}]
        return [{"id": "1", "type": "function", "function": named[0]}, {"type": "function", "function": named[1]}]

    assistant = {"role": "assistant", "content": None, "tool_calls": calls('{"q": [1]}', "")}
    result = {"role": "tool", "tool_call_id": "1", "content": "found"}
    read = {"role": "assistant", "content": "", "tool_calls": calls({"q": [1]}, {})}
    assert chat(messages=[assistant, result]).messages == (read, result)


@pytest.mark.parametrize(
    "arguments", ['{"a": [' + "{}," * 70_000 + "{}]}", '{"a": ' + "[" * 100 + "]" * 100 + "}"], ids=["many", "deep"]
)
def test_arguments_of_calls_are_bounded_as_messages_are(arguments: str) -> None:
    """JSON inside a string is read, rendered and traversed like any other."""
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    with pytest.raises(InvalidRequest, match="arguments"):
        chat(messages=[{"role": "assistant", "content": None, "tool_calls": [call]}])
    item = {"type": "function_call", "call_id": "1", "name": "look", "arguments": arguments}
    with pytest.raises(InvalidRequest, match="arguments"):
        messages_of([item], set())


def test_names_may_be_as_long_as_any_api_allows() -> None:
    """Plugins' tools have names of over OpenAI's 64 characters."""
    long = "mcp__plugin_" + "x" * 116
    assert chat(tools=[{"type": "function", "function": {"name": long}}]).tool_use.tools[0]["function"]["name"] == long
    tools = [{"type": "function", "function": {"name": long + "x"}}]
    assert_refused(chat, {"tools": tools}, "tools[0].function.name", "1 to 128")


@pytest.mark.parametrize("arguments", ['{"a": 1', "[1]", "3", "null", "f(x)", "[" * 10_000])
def test_a_call_that_was_cut_off_is_taken_back_without_its_arguments(arguments: str) -> None:
    """The server's own answer, cut at ``max_tokens``, is such a call; what the model does not see is told."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    request = chat(messages=[said, {"role": "tool", "tool_call_id": "c1", "content": "cut"}])
    assert request.messages[0]["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
    assert request.messages[1]["content"] == "cut"
    assert [field.name for field in request.unknown] == ["messages[].tool_calls[].function.arguments"]


def test_arguments_may_be_an_object() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    request = chat(messages=[{"role": "assistant", "tool_calls": [call]}])
    assert request.messages[0]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert request.unknown == ()
