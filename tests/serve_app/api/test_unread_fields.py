"""No field is dropped without a word: what is not read is in the warning, at any place of any body. (docs: api)"""

import json
from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest

from serve_app.api.anthropic.conversation import FAILED
from serve_app.api.anthropic.request import MessagesBody, parse_messages
from serve_app.api.json_body import JsonBody
from serve_app.api.openai.request import ChatBody, CompletionBody, parse_chat
from serve_app.api.openai.responses.request import ResponsesBody, parse_response_request
from serve_app.api.request import ChatRequest, GenerateRequest
from tests.serve_app.api.openai.bodies import PARSERS

Parse = Callable[[bytes], GenerateRequest]
X = {"x": 1}
FUNCTION: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
FLAT: dict[str, Any] = {"type": "function", "name": "f"}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [FUNCTION]}}
TOOL: dict[str, Any] = {"name": "f", "input_schema": {"type": "object"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BODIES = dict(zip((ChatBody, CompletionBody, ResponsesBody, MessagesBody), PARSERS.values(), strict=True))
CHAT, COMPLETION, RESPONSE, MESSAGE = (body for _, body in PARSERS.values())
OBJECTS: list[tuple[type[JsonBody], dict[str, Any], str]] = [
    *((body, X, "x") for body in BODIES),
    *(
        (body, {"stream": True, "stream_options": X}, "stream_options.x")
        for body in (ChatBody, CompletionBody, ResponsesBody)
    ),
    *(
        (body, {"prompt_cache_options": X}, "prompt_cache_options.x")
        for body in (ChatBody, CompletionBody, ResponsesBody)
    ),
    (ChatBody, {"tools": [FUNCTION, {**FUNCTION, **X, "function": {"name": "g"}}]}, "tools[].x"),
    (ChatBody, {"tools": [{"type": "function", "function": {"name": "f", **X}}]}, "tools[].function.x"),
    (ChatBody, {"tools": [FUNCTION], "tool_choice": {**FUNCTION, **X}}, "tool_choice.x"),
    (
        ChatBody,
        {"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "f", **X}}},
        "tool_choice.function.x",
    ),
    (ChatBody, {"tools": [FUNCTION], "tool_choice": {**ALLOWED, **X}}, "tool_choice.x"),
    (
        ChatBody,
        {"tools": [FUNCTION], "tool_choice": {**ALLOWED, "allowed_tools": {"mode": "auto", "tools": [FUNCTION], **X}}},
        "tool_choice.allowed_tools.x",
    ),
    (ResponsesBody, {"tools": [{**FLAT, **X}]}, "tools[].x"),
    (
        ResponsesBody,
        {"tools": [{"type": "namespace", "name": "n", "tools": [{**FLAT, **X}]}]},
        "tools[].tools[].x",
    ),
    (ResponsesBody, {"tools": [FLAT], "tool_choice": {**FLAT, **X}}, "tool_choice.x"),
    (
        ResponsesBody,
        {"tools": [FLAT], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [FLAT], **X}},
        "tool_choice.x",
    ),
    (
        ResponsesBody,
        {"tools": [FLAT], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{**FLAT, **X}]}},
        "tool_choice.tools[].x",
    ),
    (ResponsesBody, {"reasoning": X}, "reasoning.x"),
    (ResponsesBody, {"text": X}, "text.x"),
    (MessagesBody, {"tools": [{**TOOL, **X}]}, "tools[].x"),
    (MessagesBody, {"tools": [{**TOOL, "allowed_callers": ["code_execution_20260120"]}]}, "tools[].allowed_callers"),
    (MessagesBody, {"tools": [TOOL], "tool_choice": {"type": "auto", **X}}, "tool_choice.x"),
    (MessagesBody, {"output_config": X}, "output_config.x"),
    (MessagesBody, {"thinking": {"type": "enabled", **X}}, "thinking.x"),
    (MessagesBody, {"diagnostics": X}, "diagnostics.x"),
    (MessagesBody, {"context_management": X}, "context_management.x"),
    (MessagesBody, {"cache_control": {"type": "ephemeral", **X}}, "cache_control.x"),
    (
        MessagesBody,
        {"output_config": {"format": {"type": "json_schema", "schema": {}, **X}}},
        "output_config.format.x",
    ),
]
"""Bodies with a field that nobody knows, at every object of a request except in its conversation."""


def unread(parse: Parse, body: dict[str, Any]) -> list[str]:
    return [field.name for field in parse(json.dumps(body).encode()).unknown]


@pytest.mark.parametrize(("kind", "fields", "path"), OBJECTS, ids=lambda value: value if isinstance(value, str) else "")
def test_an_unknown_field_is_told_wherever_it_is(kind: type[JsonBody], fields: dict[str, Any], path: str) -> None:
    parse, body = BODIES[kind]
    assert unread(parse, {**body, **fields}) == [path]
    known = json.loads(json.dumps(fields).replace('"x": 1', '"x": null'))
    assert "x" not in "".join(name[-2:] for name in unread(parse, {**body, **known}))


def inner(kind: Any) -> Iterator[type[JsonBody]]:
    """Yield the objects inside a body, or inside a type."""
    if isinstance(kind, type) and issubclass(kind, JsonBody):
        yield kind
        for field in kind.model_fields.values():
            yield from inner(field.annotation)
    for part in get_args(kind):
        yield from inner(part)


def test_the_law_above_covers_every_object() -> None:
    """A new object of a body needs a row."""
    asked = [(BODIES[kind][1] | fields, kind) for kind, fields, path in OBJECTS if path.endswith("x")]
    tried = {
        type(found)
        for body, kind in asked
        for found in _objects(kind.checked(body))
        if "x" in (found.model_extra or ())
    }
    assert {each for body in BODIES for each in inner(body)} - tried == set()


def _objects(body: JsonBody) -> Iterator[JsonBody]:
    yield body
    for name in body.model_fields_set:
        value = getattr(body, name)
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, JsonBody):
                yield from _objects(each)


def said(role: str, *blocks: Any) -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


TEXT = {"type": "text", "text": "a"}
USE = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "r"}
THOUGHT = {"type": "thinking", "thinking": "t", "signature": "s"}
SEALED = {"type": "redacted_thinking", "data": "Zx9"}
IN = "messages[].content[]"


@pytest.mark.parametrize(
    ("blocks", "told"),
    [
        ([said("user", {**TEXT, **X})], f"{IN}.x"),
        ([said("user", {**TEXT, "citations": [{"type": "char_location"}]})], f"{IN}.citations"),
        ([said("assistant", {**THOUGHT, **X}, TEXT)], f"{IN}.x"),
        ([said("assistant", {**THOUGHT, "thinking": ""}, TEXT)], f"{IN}.signature"),
        ([said("assistant", SEALED, TEXT)], f"{IN}.redacted_thinking"),
        ([said("assistant", {"type": "fallback", "from": X, "to": X}, TEXT)], f"{IN}.fallback"),
        ([said("assistant", {**USE, **X}), said("user", RESULT)], f"{IN}.x"),
        ([said("assistant", USE), said("user", {**RESULT, **X})], f"{IN}.x"),
        ([said("assistant", USE), said("user", {**RESULT, "content": [{**TEXT, **X}]})], f"{IN}.x"),
        ([said("assistant", USE), said("user", {**RESULT, "is_error": "yes"})], f"{IN}.is_error"),
        ([{**said("user", TEXT), **X}], "messages[].x"),
        ([{**said("system", TEXT), "output_config": {"effort": "low"}}], "messages[].output_config"),
        ([said("user", {**TEXT, "cache_control": {"type": "ephemeral", **X}})], "cache_control.x"),
        ([said("user", {"type": "document", "source": {"type": "text", "data": "d"}, "citations": {"enabled": True}})],
         f"{IN}.citations"),
    ],
)  # fmt: skip
def test_what_a_message_says_in_vain_is_told(blocks: list[Any], told: str) -> None:
    body = {**MESSAGE, "messages": [*CHAT["messages"], *blocks, *CHAT["messages"]]}
    assert unread(parse_messages, body) == [told]


def test_what_a_system_prompt_says_in_vain_is_told() -> None:
    assert unread(parse_messages, {**MESSAGE, "system": [{**TEXT, **X}]}) == [f"{IN}.x"]


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({"role": "user", "content": [{**TEXT, **X}]}, f"{IN}.x"),
        ({"role": "user", "content": "a", "reasoning": "r"}, "messages[].reasoning"),
        ({"role": "user", "content": "a", "refusal": "r"}, "messages[].refusal"),
        ({"role": "user", "content": "a", "tool_call_id": "1"}, "messages[].tool_call_id"),
        ({"role": "assistant", "tool_calls": [{**CALL, **X}]}, "messages[].tool_calls[].x"),
        (
            {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{}", **X}}]},
            "messages[].tool_calls[].function.x",
        ),
        ({"role": "assistant", "content": "a", "annotations": [{"type": "url_citation"}]}, "messages[].annotations"),
    ],
)
def test_what_a_chats_message_says_in_vain_is_told(message: dict[str, Any], told: str) -> None:
    assert unread(parse_chat, {**CHAT, "messages": [*CHAT["messages"], message, *CHAT["messages"]]}) == [told]


OUTPUT = {"type": "output_text", "text": "a", "annotations": []}


@pytest.mark.parametrize(
    ("item", "told"),
    [
        ({"type": "reasoning", "summary": [], "encrypted_content": "Zx9"}, "input[].encrypted_content"),
        ({"type": "reasoning", "summary": [], **X}, "input[].x"),
        ({**said("assistant", OUTPUT), **X}, "input[].x"),
        (said("assistant", {**OUTPUT, "annotations": [{"type": "url_citation"}]}), "input[].content[].annotations"),
        ({"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", **X}, "input[].x"),
        ({"type": "function_call_output", "call_id": "1", "output": "r", **X}, "input[].x"),
    ],
)
def test_what_an_item_says_in_vain_is_told(item: dict[str, Any], told: str) -> None:
    assert unread(parse_response_request, {**RESPONSE, "input": [said("user", TEXT), item]}) == [told]


def test_what_clients_send_back_of_our_answers_is_no_unknown_field() -> None:
    """Ids, marks and empty lists."""
    back = {
        "role": "assistant",
        "content": "a",
        "refusal": None,
        "annotations": [],
        "tool_calls": [{**CALL, "index": 0}],
    }
    assert unread(parse_chat, {**CHAT, "messages": [*CHAT["messages"], back, *CHAT["messages"]]}) == []
    items = [
        {"type": "reasoning", "id": "rs_1", "status": "completed", "summary": [], "content": []},
        {**said("assistant", {**OUTPUT, "logprobs": []}), "id": "msg_1", "status": "completed", "phase": "commentary"},
    ]
    assert unread(parse_response_request, {**RESPONSE, "input": [said("user", TEXT), *items]}) == []
    blocks = [said("assistant", THOUGHT, {**TEXT, "citations": None}, {**USE, "caller": {"type": "direct"}})]
    body = {**MESSAGE, "messages": [*CHAT["messages"], *blocks, said("user", {**RESULT, "is_error": False})]}
    assert unread(parse_messages, body) == []


@pytest.mark.parametrize(
    ("content", "shown"),
    [("No such file.", f"{FAILED}\nNo such file."), ([], FAILED), (None, FAILED), ([TEXT], f"{FAILED}\na")],
)
def test_a_model_is_told_that_a_call_failed(content: Any, shown: str) -> None:
    """By one rule: a first line. So the prompt differs from that of a success, and its hashes with it. (docs: api)"""

    def asked(**fields: Any) -> ChatRequest:
        result = {**RESULT, "content": content, **fields}
        body = {**MESSAGE, "messages": [*CHAT["messages"], said("assistant", USE), said("user", result)]}
        return parse_messages(json.dumps(body).encode())

    failed, whole = asked(is_error=True), asked()
    assert [failed.messages[-1]["content"], failed.unknown] == [shown, ()]
    assert whole.messages[-1]["content"] == shown.removeprefix(FAILED).lstrip("\n")
    assert asked(is_error=False) == whole
    assert failed.repeated["diagnostics"] != whole.repeated["diagnostics"]


@pytest.mark.parametrize(
    ("fields", "switches", "shown"),
    [
        ({"output_config": {"effort": "high"}}, {"reasoning_effort": "high"}, True),
        (
            {"output_config": {"effort": "low"}, "thinking": {"type": "adaptive", "display": "omitted"}},
            {"enable_thinking": True, "thinking": True, "reasoning_effort": "low"},
            False,
        ),
        (
            {"output_config": {"effort": "low"}, "thinking": {"type": "disabled"}},
            {"enable_thinking": False, "thinking": False},
            True,
        ),
        ({}, {}, True),
    ],
)
def test_a_messages_effort_reaches_the_chat_template(fields: Any, switches: dict[str, Any], shown: bool) -> None:
    """As a chat's does; ``display`` omitted leaves the thought out of the answer. (docs: api)"""
    asked = parse_messages(json.dumps({**MESSAGE, **fields}).encode())
    assert (asked.thinking, asked.include_reasoning) == (switches, shown)
