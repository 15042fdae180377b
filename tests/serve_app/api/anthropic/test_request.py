"""Bodies of messages: their form for templates, their marked places, and their errors (400)."""

import json
from typing import Any

import pytest

from serve_app.api.anthropic.conversation import ConversationReader
from serve_app.api.anthropic.request import parse_messages
from serve_app.api.request import ChatRequest, reasoning_fields
from serve_app.errors import InvalidRequest

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
        assert [field.name for field in asked.unknown] == ["messages[].content[].input"] * (content == [cut])
        assert parse(messages=[{"role": "user", "content": "Hi"}, spoken]).add_generation_prompt
    assert parse(messages=[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": []}]) == parse()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"max_tokens": 0, "stream": True}, "max_tokens must be at least 1"),
        ({"temperature": 1.5}, "temperature must be a number from 0 to 1"),
        ({"thinking": {"type": "always"}}, "thinking.type must be enabled, adaptive or disabled"),
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
