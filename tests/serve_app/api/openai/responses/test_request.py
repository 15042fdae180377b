"""Bodies of responses become chats, or a 400 that names the field."""

import json
from typing import Any

import pytest

from serve_app.api.openai.responses.items import stored_items
from serve_app.api.openai.responses.request import LOGPROBS, parse_response_request
from serve_app.api.request import ChatRequest, ToolUse, reasoning_fields
from tests.serve_app.api.openai.bodies import assert_refused, chat

SEARCH = {"type": "function", "name": "search", "parameters": {"type": "object"}, "strict": True}


def parse(**fields: Any) -> ChatRequest:
    return parse_response_request(json.dumps({"model": "demo", "input": "Hi", **fields}).encode())


def test_text_is_a_users_message() -> None:
    """Instructions come before it; absent fields have a chat's defaults."""
    assert parse().messages == ({"role": "user", "content": "Hi"},)
    request = parse(instructions="Be brief.", max_output_tokens=7, temperature=0, top_p=0.5, prompt_cache_key="k")
    assert request.messages[0] == {"role": "system", "content": "Be brief."}
    assert (request.max_tokens, request.temperature, request.top_p, request.prompt_cache_key) == (7, 0, 0.5, "k")
    assert parse().tool_use == ToolUse()


def test_logprobs_are_returned_if_included() -> None:
    """By default they list no alternatives; tools are allowed if no call is parsed."""
    assert parse().logprobs is None
    assert parse(include=["reasoning.encrypted_content"]).logprobs is None
    assert parse(include=[LOGPROBS]).logprobs == 0
    request = parse(include=[LOGPROBS], top_logprobs=3, tools=[SEARCH], tool_choice="none")
    assert (request.logprobs, request.repeated["top_logprobs"]) == (3, 3)


def test_items_are_a_conversation() -> None:
    """Clients send it back: calls join the assistant's text, results become a tool's, and reasoning its answer's."""
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Ra"},
                                                        {"type": "input_text", "text": "in?"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"id": "m", "type": "message", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "Wait.", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "id": "f1", "call_id": "c1", "name": "search", "arguments": '{"q": 1}'},
        {"type": "function_call", "id": "f2", "call_id": "c2", "name": "search", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "yes"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "no"}]},
    ]  # fmt: skip
    request = parse(input=items)

    def call(call_id: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "search", "arguments": arguments}, "id": call_id}

    assert request.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Rain?"},
        {
            "role": "assistant",
            "content": "Wait.",
            **reasoning_fields("hm"),
            "tool_calls": [call("c1", {"q": 1}), call("c2", {})],
        },
        {"role": "tool", "content": "yes", "tool_call_id": "c1"},
        {"role": "tool", "content": "no", "tool_call_id": "c2"},
    )
    assert request.unknown == ()


def test_a_refusal_is_text_that_the_assistant_said() -> None:
    part = {"type": "refusal", "refusal": "I will not."}
    asked = parse(input=[{"role": "assistant", "content": [part]}, {"role": "user", "content": "Why?"}])
    assert asked.messages[0] == {"role": "assistant", "content": "I will not."}
    assert stored_items([{"role": "assistant", "content": [part]}])[0]["content"] == [part]


def test_a_call_that_was_cut_off_is_taken_back_without_its_arguments() -> None:
    cut = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1', "status": "incomplete"}
    asked = parse(input=[cut, {"type": "function_call_output", "call_id": "c", "output": "cut"}])
    assert asked.messages[0]["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
    assert [field.name for field in asked.unknown] == ["input[].arguments"]


def test_tools_are_a_chats() -> None:
    """The prompt is the same, so the KV is the same."""
    function = {name: SEARCH[name] for name in ("name", "parameters")}
    assert parse(tools=[SEARCH]).tool_use == chat(tools=[{"type": "function", "function": function}]).tool_use
    named = parse(tools=[SEARCH], tool_choice={"type": "function", "name": "search"}).tool_use
    assert (named.must_call, named.only) == (True, "search")


def test_clients_default_fields_pass() -> None:
    """Hints change nothing and are no unknown fields, in chats as well; an answer reports the true value of store."""
    request = parse(
        store=True, metadata={"a": "b"}, include=["reasoning.encrypted_content"], truncation="disabled", user="u",
        service_tier="auto", background=False, reasoning=None, text={"format": {"type": "text"}, "verbosity": "low"},
        prompt_cache_retention="24h", prompt_cache_options={"mode": "explicit"}, stream=True,
        stream_options={"include_obfuscation": False},
        input=[{"role": "user", "content": [{"type": "input_text", "text": "Hi",
                                             "prompt_cache_breakpoint": {"mode": "explicit"}}]}],
    )  # fmt: skip
    assert request.unknown == ()
    assert request.repeated["store"] is False
    assert request.repeated["metadata"] == {"a": "b"}
    assert request.messages == parse().messages
    part = {"type": "text", "text": "Hi", "prompt_cache_breakpoint": {"mode": "explicit"}}
    fields = {"prompt_cache_retention": "in_memory", "prompt_cache_options": {"ttl": "30m"}, "store": True}
    assert chat(messages=[{"role": "user", "content": [part]}], **fields).unknown == ()


def test_unknown_fields_are_named() -> None:
    request = parse(instrctions="x", input=[{"role": "user", "content": "Hi", "nme": 1}], tools=[{**SEARCH, "x": 1}])
    assert {field.name for field in request.unknown} == {"instrctions", "input[].nme", "tools[].x"}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": None}, "input", "missing"), ({"input": []}, "input", "at least one"),
        ({"input": 3}, "input", "string"),
        ({"input": ["x"]}, "input[0]", "object"),
        ({"input": [{"type": "item_reference", "id": "m"}]}, "input[0]", "use previous_response_id"),
        ({"input": [{"type": "computer_call"}]}, "input[0]", "one of message"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "one of"),
        ({"input": [{"role": "user"}]}, "input[0].content", "string"),
        ({"include": [3]}, "include", "list of strings"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content", "text only"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id", "1 to 1024"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output", "string"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored"),
        ({"conversation": "c"}, "conversation", "use previous_response_id"), ({"store": "x"}, "store", "true or false"),
        ({"background": True}, "background", "leave it out"),
        ({"prompt": {"id": "p"}}, "prompt", "use prompt_ref"), ({"truncation": "auto"}, "truncation", "not supported"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort", "xhigh or max"), ({"n": 2}, "n", "one answer"),
        ({"include": [LOGPROBS], "tools": [SEARCH]}, "include", "does not go with tools"),
        ({"top_logprobs": 2}, "top_logprobs", "needs include"),
        ({"top_logprobs": 21, "include": [LOGPROBS]}, "top_logprobs", "from 0 to 20"),
        ({"max_output_tokens": 0}, "max_output_tokens", "whole number"),
        ({"instructions": 3}, "instructions", "string"),
    ],
)  # fmt: skip
def test_an_unsupported_request_is_a_400(fields: dict[str, Any], param: str, words: str) -> None:
    assert_refused(parse, fields, param, words)
