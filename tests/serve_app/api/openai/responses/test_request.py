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


def test_the_form_of_the_text_is_the_grammar() -> None:
    """Also where no field of a chat's asks for one."""
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    grammar = parse(text={"format": form}).grammar
    assert grammar is not None and grammar.field == "text.format.schema"
    assert parse(text={"format": {"type": "text"}}).grammar is None
    assert_refused(parse, {"text": {"format": form}, "structured_outputs": {"regex": "a"}}, "structured_outputs")


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


@pytest.mark.parametrize(
    ("item", "role", "said"),
    [
        ({"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "query": "sky"}},
         "assistant", '{"action":{"query":"sky","type":"search"},"status":"completed","type":"web_search_call"}'),
        ({"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "wet", "stderr": ""}]},
         "user", '{"output":[{"stderr":"","stdout":"wet"}],"type":"shell_call_output"}'),
        ({"type": "mcp_call", "id": "m", "name": "look", "server_label": "sky", "arguments": "{}", "output": "wet"},
         "assistant", '{"arguments":"{}","name":"look","output":"wet","server_label":"sky","type":"mcp_call"}'),
        ({"type": "mcp_approval_response", "approval_request_id": "a", "approve": True},
         "user", '{"approval_request_id":"a","approve":true,"type":"mcp_approval_response"}'),
        ({"type": "additional_tools", "role": "developer", "tools": [SEARCH]},
         "system", '{"role":"developer","tools":[{"name":"search","parameters":{"type":"object"},"strict":true,'
                   '"type":"function"}],"type":"additional_tools"}'),
    ],
)  # fmt: skip
def test_items_of_tools_that_ran_elsewhere_are_text(item: dict[str, Any], role: str, said: str) -> None:
    """Nothing that they say is lost, and they are stored as they are."""
    asked = parse(input=[item, {"role": "user", "content": "So?"}])
    assert asked.messages[0] == {"role": role, "content": f"\n{said}\n"}
    assert asked.unknown == ()
    (stored,) = stored_items([item])
    assert parse(input=[stored]).messages[0]["role"] == role
    assert {**item, "id": stored["id"], "status": "completed"} == stored


def test_a_custom_tools_call_is_a_functions_whose_input_is_text() -> None:
    """OpenAI's clients send its result by the call's id, as that of a function."""
    items = [
        {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
    ]
    asked = parse(input=items)
    function = {"name": "patch", "arguments": {"input": "*** Begin"}}
    assert asked.messages == (
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function, "id": "c"}]},
        {"role": "tool", "content": "done", "tool_call_id": "c"},
    )
    assert parse(input=stored_items(items)).messages == asked.messages
    call = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert (
        chat(messages=[said, {"role": "tool", "content": "done", "tool_call_id": "c"}]).messages[0]["tool_calls"]
        == (asked.messages[0]["tool_calls"])
    )


def test_what_only_openai_can_read_is_left_out_with_a_warning() -> None:
    """It is encrypted, or an image that a tool made."""
    compacted = {"type": "compaction", "encrypted_content": "Zx9"}
    drawn = {"type": "image_generation_call", "id": "i", "status": "completed", "result": "AAAA"}
    seen = {"type": "computer_call_output", "call_id": "c",
            "output": {"type": "computer_screenshot", "image_url": "data:image/png;base64,AA"}}  # fmt: skip
    asked = parse(input=[compacted, drawn, seen, {"role": "user", "content": "So?"}])
    assert [message["content"] for message in asked.messages] == [
        '\n{"status":"completed","type":"image_generation_call"}\n',
        '\n{"output":{"type":"computer_screenshot"},"type":"computer_call_output"}\n',
        "So?",
    ]
    assert {field.name for field in asked.unknown} == {"input[].compaction", "input[].image_url", "input[].result"}


def test_reasoning_is_kept_without_an_answer_too() -> None:
    """It was cut off, or only its summary came back; it belongs to the assistant's turn."""
    cut = {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    told = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}]}
    for item in (cut, told):
        alone = {"role": "assistant", "content": "", **reasoning_fields("hm")}
        assert parse(input=[item, {"role": "user", "content": "So?"}]).messages[0] == alone
        assert parse(input=[item]).messages == (alone,)
        assert parse(input=stored_items([item])).messages == (alone,)


def test_a_result_without_a_calls_id_is_the_last_calls() -> None:
    """OpenAI's clients may leave it out."""
    call = {"type": "function_call", "call_id": "c", "name": "search", "arguments": "{}"}
    result = {"type": "function_call_output", "output": "yes"}
    assert parse(input=[call, result]).messages[1] == {"role": "tool", "content": "yes", "tool_call_id": "c"}
    assert parse(input=[result]).messages == ({"role": "tool", "content": "yes"},)


def test_a_call_that_was_cut_off_is_taken_back_without_its_arguments() -> None:
    cut = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1', "status": "incomplete"}
    asked = parse(input=[cut, {"type": "function_call_output", "call_id": "c", "output": "cut"}])
    assert asked.messages[0]["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
    assert [field.name for field in asked.unknown] == ["input[].arguments"]


def test_tools_are_a_chats() -> None:
    """The prompt is the same, so the KV is the same."""
    function = {name: SEARCH[name] for name in ("name", "parameters", "strict")}
    assert parse(tools=[SEARCH]).tool_use == chat(tools=[{"type": "function", "function": function}]).tool_use
    named = parse(tools=[SEARCH], tool_choice={"type": "function", "name": "search"}).tool_use
    assert (named.must_call, named.allowed) == (True, {"search"})


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
        ({"input": [{"type": ["message"]}]}, "input[0]", "not read here"),
        ({"input": [{"type": "compaction_trigger"}]}, "input[0]", "'compaction_trigger', which is not read here"),
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
