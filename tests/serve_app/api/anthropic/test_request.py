"""Messages: bodies, marked places and errors (400); each prompt token counted once; events that build the answer."""

import json
import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.api.anthropic.conversation import ConversationReader
from serve_app.api.anthropic.history import MAX_MESSAGES, MessageHistory, RequestDigests, digest, digests
from serve_app.api.anthropic.request import parse_messages
from serve_app.api.anthropic.response import MessagesFormat
from serve_app.api.format import (
    AnswerHead,
    ApiFinishReason,
    CallArguments,
    CallBegun,
    CallEnded,
    Choice,
    ToolCall,
    Usage,
)
from serve_app.api.request import ChatRequest, reasoning_fields
from serve_app.engine.protocol import Save
from serve_app.errors import InvalidRequest
from serve_app.generation.request_usage import kept_tokens

MARK = {"type": "ephemeral"}
DEEP_CALL = {"type": "tool_use", "id": "1", "name": "a", "input": json.loads('{"a":' * 100 + "1" + "}" * 100)}
HOUR = {"type": "ephemeral", "ttl": "1h"}


def parse(**fields: Any) -> ChatRequest:
    body = {"model": "demo", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}], **fields}
    return parse_messages(json.dumps(body).encode())


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def test_blocks_become_messages_for_templates() -> None:
    """Texts are joined; calls and their results have the form of OpenAI's chats."""
    request = parse(
        system=[text("Be "), text("brief.")],
        messages=[
            {"role": "user", "content": [text("Rain"), text("?")]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    text("Let me look."),
                    {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": 1}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": [text("wet")]}, text("So?")],
            },
        ],
    )
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"at": 1}}}
    assert request.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": "Let me look.", **reasoning_fields("hm"), "tool_calls": [call]},
        {"role": "tool", "content": "wet", "tool_call_id": "1"},
        {"role": "user", "content": "So?"},
    )
    assert request.add_generation_prompt
    assert parse(
        messages=[{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    ).continue_final_message


def test_marks_hold_the_conversation_up_to_them() -> None:
    """They follow the prompt's order: tools, system, messages; a message is cut at the mark, even between its calls."""
    tool = {"name": "look", "input_schema": {"type": "object"}, "cache_control": HOUR}
    request = parse(
        tools=[tool],
        system=[text("One. ", cache_control=HOUR), text("Two.")],
        messages=[{"role": "user", "content": [text("a", cache_control=MARK), text("b")]}],
        cache_control=MARK,
    )
    system = {"role": "system", "content": "One. Two."}
    assert [(mark.messages, mark.ttl_s) for mark in request.breakpoints] == [
        ((), 3600.0),
        (({"role": "system", "content": "One. "},), 3600.0),
        ((system, {"role": "user", "content": "a"}), 300.0),
        ((system, {"role": "user", "content": "ab"}), 300.0),
    ]
    calls: list[Any] = [{"type": "tool_use", "id": str(i), "name": "look", "input": {}} for i in range(3)]
    calls[1]["cache_control"] = MARK
    request = parse(messages=[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": calls}])
    said = (request.breakpoints[0].messages[-1], request.messages[-1])
    assert [[call["id"] for call in one["tool_calls"]] for one in said] == [["0", "1"], ["0", "1", "2"]]


def test_many_blocks_are_not_copied_for_each_that_follows() -> None:
    """A message of tens of thousands of blocks would take seconds."""
    copied = 0

    class Words(str):
        __slots__ = ()

        def __radd__(self, before: str) -> str:
            nonlocal copied
            copied += len(before)
            return before + str(self)

    read = ConversationReader()
    read.add_system([text(Words("abc")) for _ in range(100)])
    read.add_message({"role": "user", "content": [text(Words("abc")) for _ in range(100)]}, 0)
    assert [message["content"] for message in read.messages] == ["abc" * 100] * 2
    assert copied <= 600


SEARCH = {"type": "search_result", "title": "Sky", "source": "sky.example", "content": [text("It is wet.")]}
PLAIN = {"type": "document", "title": "Notes", "source": {"type": "text", "media_type": "text/plain", "data": "Wet."}}
FOUND = {"type": "web_search_result", "title": "Sky", "url": "sky.example", "encrypted_content": "Zx9"}


@pytest.mark.parametrize(
    ("role", "block", "said"),
    [
        ("user", SEARCH, "\nSky\nsky.example\nIt is wet.\n"),
        ("user", PLAIN, "\nNotes\nWet.\n"),
        ("user", {"type": "document", "source": {"type": "content", "content": [text("Wet.")]}}, "\nWet.\n"),
        ("user", {"type": "container_upload", "file_id": "f"}, '\n{"file_id":"f","type":"container_upload"}\n'),
        ("assistant", {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "sky"}},
         '\n{"input":{"query":"sky"},"name":"web_search","type":"server_tool_use"}\n'),
        ("assistant", {"type": "web_search_tool_result", "tool_use_id": "s", "content": [FOUND]},
         '\n{"content":[{"title":"Sky","type":"web_search_result","url":"sky.example"}],'
         '"type":"web_search_tool_result"}\n'),
        ("assistant", {"type": "bash_code_execution_tool_result", "tool_use_id": "s",
                       "content": {"type": "bash_code_execution_result", "stdout": "wet", "content": []}},
         '\n{"content":{"content":[],"stdout":"wet","type":"bash_code_execution_result"},'
         '"type":"bash_code_execution_tool_result"}\n'),
        ("assistant", {"type": "mcp_tool_use", "id": "m", "name": "look", "server_name": "sky", "input": {}},
         '\n{"input":{},"name":"look","server_name":"sky","type":"mcp_tool_use"}\n'),
        ("assistant", {"type": "compaction", "content": "They spoke of rain."}, "\nThey spoke of rain.\n"),
    ],
)  # fmt: skip
def test_blocks_of_tools_that_ran_elsewhere_are_text(role: str, block: dict[str, Any], said: str) -> None:
    """Nothing that they say is lost, and the text is the same in each turn, whatever the order of their fields."""
    for same in (block, dict(reversed(block.items()))):
        asked = parse(
            messages=[{"role": role, "content": [text("a"), same, text("b")]}, {"role": "user", "content": "?"}]
        )
        assert asked.messages[0] == {"role": role, "content": f"a{said}b"}
        assert asked.unknown == ()


def test_a_tools_result_may_hold_any_text() -> None:
    """A mark on a block of it is one on the result."""
    blocks = [{"type": "tool_reference", "tool_name": "look"}, SEARCH, {**PLAIN, "cache_control": MARK}]
    call = {"type": "tool_use", "id": "1", "name": "find", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": blocks}
    asked = parse(messages=[{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}])
    lines = '\n{"tool_name":"look","type":"tool_reference"}\n', "\nSky\nsky.example\nIt is wet.\n", "\nNotes\nWet.\n"
    assert asked.messages[-1] == {"role": "tool", "content": "".join(lines), "tool_call_id": "1"}
    assert [mark.messages for mark in asked.breakpoints] == [asked.messages]


def test_what_cannot_be_shown_is_named() -> None:
    """A block of a newer kind is text; what is encrypted for another server, and an image in a result, is left out."""
    shot = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
    state = {"type": "browser_state", "changes": [shot], "tabs": []}
    blocks = [text("a"), {"type": "dream", "of": "rain"}, {"type": "compaction", "encrypted_content": "Zx9"}, state]
    asked = parse(messages=[{"role": "user", "content": blocks}])
    assert asked.messages[0]["content"] == (
        'a\n{"of":"rain","type":"dream"}\n\n{"changes":[{"type":"image"}],"tabs":[],"type":"browser_state"}\n'
    )
    where = "messages[].content[]"
    assert [field.name for field in asked.unknown] == [f"{where}.compaction", f"{where}.dream", f"{where}.source"]


def test_an_answer_that_was_cut_off_or_empty_is_taken_back() -> None:
    """Its reasoning is kept, and the input of a cut call is empty; the conversation goes on."""
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    cut = {"type": "tool_use", "id": "1", "name": "look", "input": '{"at'}
    for content, said in (
        ([thought], reasoning_fields("hm")),
        ([], {}),
        (None, {}),
        ([{"type": "redacted_thinking", "data": "Zx9"}], {}),
        ([cut], {"tool_calls": [{"id": "1", "type": "function", "function": {"name": "look", "arguments": {}}}]}),
    ):
        spoken = {"role": "assistant", "content": content}
        asked = parse(messages=[{"role": "user", "content": "Hi"}, spoken, {"role": "user", "content": "So?"}])
        assert asked.messages[1] == {"role": "assistant", "content": "", **said}
        named = {"tool_use": "input", "redacted_thinking": "redacted_thinking"}.get((content or [{}])[0].get("type"))
        assert [field.name for field in asked.unknown] == [f"messages[].content[].{named}"] * bool(named)
        assert parse(messages=[{"role": "user", "content": "Hi"}, spoken]).add_generation_prompt
    assert parse(messages=[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": []}]) == parse()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"max_tokens": 0, "stream": True}, "max_tokens must be at least 1"),
        ({"temperature": 1.5}, "temperature must be a number from 0 to 1"),
        ({"thinking": {"type": "always"}}, "thinking.type must be enabled, adaptive, between_tools or disabled"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking"}]}]}, "must be from assistant"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "has the type 'image'"),
        ({"messages": [{"role": "user", "content": [{"type": ["text"]}]}]}, "has the type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "url", "url": "u"}}]}]},
            "messages[0].content[0].source has the type 'url', which is not read here",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "search_result", "content": [{"type": "image"}]}]}]},
            "'image' is not read here",
        ),
        ({"messages": [{"role": "user", "content": None}]}, "a list of blocks"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "is for assistant, not user"),
        ({"messages": [{"role": "assistant", "content": [DEEP_CALL]}]}, "at most 64 deep"),
        ({"messages": [{"role": "boss", "content": "a"}]}, "a role, one of"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "other tools are not supported"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice has a name"),
        ({"system": [text("a", cache_control=MARK)] * 5}, "system[4].cache_control is over the limit of 4"),
        (
            {"system": [text("a", cache_control=MARK)] * 4, "cache_control": MARK},
            "cache_control is over the limit of 4",
        ),
        ({"system": [text("a", cache_control=MARK)], "cache_control": HOUR}, "must come before all that have 5m"),
        ({"system": [text("", cache_control=MARK)]}, "empty text blocks"),
        ({"cache_control": {"type": "ephemeral", "ttl": ["5m"]}}, 'a ttl of "5m" or "1h"'),
        ({"output_config": {"format": {"type": "text"}}}, "json_schema"),
    ],
)
def test_an_unsupported_request_is_a_400_with_the_reason(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        parse(**fields)
    assert said in raised.value.message


def test_fields_without_effect_pass() -> None:
    """Anthropic's clients send these fields; only unknown ones are named."""
    request = parse(thinking={"type": "disabled"}, metadata={"user_id": "u"}, service_tier="auto", top_kk=4)
    assert [field.name for field in request.unknown] == ["top_kk"]


ASKED = RequestDigests(b"m", b"s", b"t", (b"1",))
HEAD = AnswerHead("1", 0, "demo", repeated={"diagnostics": ASKED})
ARGUMENTS = st.dictionaries(st.text(max_size=5), st.integers(), max_size=3)


def fresh_format() -> MessagesFormat:
    return MessagesFormat(partial(MessageHistory().compare, "acme"))


def built(raw: bytes) -> dict[str, Any]:
    """Build a message as Anthropic's clients do; fail if events are out of order or misnamed."""
    shown = []
    for event in raw.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        shown.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {shown[-1]['type']}"
    kinds = " ".join(event["type"] for event in shown).replace("content_block_", "")
    assert re.fullmatch("message_start( start( delta)* stop)* message_delta message_stop", kinds)
    message: dict[str, Any] = shown[0]["message"]
    assert message["content"] == []
    for event in shown[1:-2]:
        if event["type"] == "content_block_start":
            message["content"].append(event["content_block"])
            parts: list[str] = []
        elif event["type"] == "content_block_delta":
            parts.append(event["delta"].get("text") or event["delta"].get("partial_json"))
        elif message["content"][-1]["type"] == "text":
            message["content"][-1]["text"] = "".join(parts)
        elif parts:
            message["content"][-1]["input"] = json.loads("".join(parts))
        assert event["index"] == len(message["content"]) - 1
    message |= shown[-2]["delta"]
    message["usage"] |= shown[-2]["usage"]
    return message


@given(
    st.text(max_size=20),
    st.lists(st.tuples(st.text(min_size=1, max_size=8), ARGUMENTS), max_size=3),
    st.sampled_from(["stop", "length", "tool_calls"]),
    st.sampled_from(["", "END"]),
    st.integers(1, 9),
)
def test_a_stream_builds_the_whole_answer(
    text: str, called: list[tuple[str, dict[str, int]]], reason: ApiFinishReason, stop: str, step: int
) -> None:
    usage = Usage(100, 7, 32, 16, 16)
    stream = fresh_format().stream(HEAD)
    raw = stream.opening(0, Usage(100, 1, 32, 16, 16))
    for at in range(0, len(text), step):
        raw += stream.text(0, text[at : at + step])
    calls = []
    for number, (name, arguments) in enumerate(called):
        raw += stream.call(0, CallBegun(f"call_{number}", name))
        encoded = json.dumps(arguments)
        calls.append(ToolCall(f"call_{number}", name, encoded))
        for at in range(0, len(encoded), step):
            raw += stream.call(0, CallArguments(encoded[at : at + step]))
        raw += stream.call(0, CallEnded(encoded))
    raw += stream.finish(0, reason, stop) + stream.usage(usage)
    whole = fresh_format().whole(HEAD, [Choice(text, reason, tuple(calls), stop_sequence=stop)], usage)
    assert built(raw) == whole


@pytest.mark.parametrize("shown", [True, False])
def test_an_omitted_thought_leaves_an_empty_block(shown: bool) -> None:
    """As from Anthropic with ``display`` omitted, whole and streamed; the answer follows it. (docs: api)"""
    head, usage = replace(HEAD, shows_reasoning=shown), Usage(100, 7, 32)
    whole = fresh_format().whole(head, [Choice("Yes.", "stop", reasoning="Hm.")], usage)
    assert whole["content"][0] == {"type": "thinking", "thinking": "Hm." if shown else "", "signature": "1"}
    stream = fresh_format().stream(head)
    raw = stream.opening(0, usage) + stream.reasoning(0, "Hm.") + stream.text(0, "Yes.") + stream.finish(0, "stop")
    assert (b'"thinking_delta"' in raw) == shown == (b"Hm." in raw)
    assert raw.count(b'"content_block_start"') == 2 and b'"signature_delta"' in raw


@given(
    st.lists(st.tuples(st.integers(1, 64), st.sampled_from([300.0, 3600.0])), max_size=4),
    st.integers(0, 64),
    st.integers(0, 100),
)
def test_every_token_of_a_prompt_is_counted_once(
    marks: list[tuple[int, float]], cached_blocks: int, more_tokens: int
) -> None:
    """A token is read, written for minutes, written for an hour, or neither; the longest time counts. (docs: api)"""
    keep = [Save(b"", blocks * 16, ttl_s) for blocks, ttl_s in marks]
    cached = cached_blocks * 16
    prompt = max([cached, *(kept.tokens for kept in keep)]) + more_tokens
    kept_5m, kept_1h = kept_tokens(keep, cached)
    body = fresh_format().whole(HEAD, [Choice("", "stop")], Usage(prompt, 1, cached, kept_5m, kept_1h))
    usage = body["usage"]
    parts = (usage["input_tokens"], usage["cache_creation_input_tokens"], usage["cache_read_input_tokens"])
    assert min(parts) >= 0
    assert sum(parts) == prompt
    assert sum(usage["cache_creation"].values()) == usage["cache_creation_input_tokens"]
    states = ["read" if at < cached else "" for at in range(prompt)]
    for at, state in enumerate(states):
        ttls = [kept.ttl_s for kept in keep if at < kept.tokens]
        if not state and ttls:
            states[at] = "1h" if max(ttls) == 3600 else "5m"
    assert (kept_5m, kept_1h) == (states.count("5m"), states.count("1h"))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.lists(st.integers(0, 3), min_size=1, max_size=5))
def test_messages_changed_unless_they_continue(before: list[int], now: list[int]) -> None:
    """A conversation that begins with all of the earlier one has no reason to miss the cache."""
    history = MessageHistory()
    history.compare("acme", "msg_1", RequestDigests(b"m", b"s", b"t", digests(before)), Usage(100, 1, 0))
    told = history.compare("acme", "msg_2", RequestDigests(b"m", b"s", b"t", digests(now), "msg_1"), Usage(120, 1, 64))
    changed = {"cache_miss_reason": {"type": "messages_changed", "cache_missed_input_tokens": 36}}
    assert told == (None if now[: len(before)] == before else changed)


def test_reasons_come_in_the_order_of_the_prompt_and_histories_are_bounded() -> None:
    """Only the first difference is reported; for forgotten messages or those of other ingresses nothing is guessed."""
    history = MessageHistory()
    history.compare("acme", "msg_1", ASKED, Usage(10, 1, 0))

    def reason(changed: bytes = b"", previous: str = "msg_1", history: MessageHistory = history) -> str:
        fields = [b"x" if field in changed else bytes([field]) for field in b"mst"]
        told = history.compare("acme", "msg_2", RequestDigests(*fields, (b"1",), previous), Usage(10, 1, 0))
        return str(told and told["cache_miss_reason"]["type"])

    reasons = [reason(changed) for changed in (b"mst", b"st", b"t", b"")]
    assert reasons == ["model_changed", "system_changed", "tools_changed", "None"]
    assert reason(previous="msg_0") == "previous_message_not_found"
    assert reason(previous="msg_0", history=MessageHistory(complete=False)) == "unavailable"
    for number in range(MAX_MESSAGES):
        history.compare("zeta", f"msg_z{number}", ASKED, Usage(10, 1, 0))
    assert reason() == "None", "other tenants evict nothing"
    for number in range(MAX_MESSAGES):
        history.compare("acme", f"msg_a{number}", ASKED, Usage(10, 1, 0))
    assert reason() == "previous_message_not_found"
    assert digest("text") != b"text"
