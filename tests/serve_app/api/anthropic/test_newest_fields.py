"""Anthropic's newest fields, as its clients send them: tools that come and go, reminders, examples."""

import json
from typing import Any

import pytest

from serve_app.api.anthropic.request import parse_count, parse_messages
from serve_app.api.request import ChatRequest
from serve_app.errors import InvalidRequest


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "demo", "max_tokens": 5, **fields}).encode()


def parse(**fields: Any) -> ChatRequest:
    return parse_messages(body(**fields))


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "description": f"It does {name}.", "input_schema": {"type": "object"}, **fields}


def added(name: str, kind: str = "tool_addition", /, **defined: Any) -> dict[str, Any]:
    named = {"type": "tool_definition", "definition": defined} if defined else {"type": "tool_reference", "name": name}
    return {"role": "system", "content": [{"type": kind, "tool": named}]}


def found(name: str) -> list[dict[str, Any]]:
    """A search of tools, and its result."""
    call = {"type": "tool_use", "id": "c1", "name": "search", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "tool_reference", "tool_name": name}]}
    return [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]


def shown(request: ChatRequest) -> list[str]:
    return [one["function"]["name"] for one in request.tool_use.shown]


def test_a_deferred_tool_is_shown_where_it_is_found() -> None:
    """The prompt before stays the same when a client adds the tool; it may be called as any other."""
    before = parse(tools=[tool("search")], messages=[user("Hi")])
    asked = {"tools": [tool("later", defer_loading=True), tool("search")], "messages": [user("Hi"), *found("later")]}
    after = parse(**asked)
    assert shown(after) == shown(before) == ["search"]
    assert after.messages[0] == before.messages[0]
    assert "It does later." in after.messages[-1]["content"]
    assert {*after.tool_use.schemas} == {"search", "later"}
    assert (after.prompt_rules, after.unknown) == (("deferred_tools",), ())


def test_without_the_rules_all_tools_are_in_front() -> None:
    """Then a tool that is found changes the prompt's beginning."""
    tools = [tool("later", defer_loading=True), tool("search")]
    plain = parse_messages(body(tools=tools, messages=[user("Hi"), *found("later")]), follow_rules=False)
    assert shown(plain) == ["later", "search"] and "It does" not in plain.messages[-1]["content"]
    assert plain.prompt_rules == ()
    line = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1;"}
    for follows, said in ((True, ""), (False, line["text"])):
        request = parse_messages(body(system=[line], messages=[user("Hi")]), follow_rules=follows)
        assert request.messages[0]["content"] == said
        assert request.prompt_rules == (("billing_line",) if follows else ())


def test_tools_come_and_go_between_messages() -> None:
    """By reference or by value; a call of one that has left is text, until it is back."""
    tools = [tool("search"), tool("later", defer_loading=True)]
    asked = parse(tools=tools, messages=[user("Hi"), added("later"), user("And?")])
    assert shown(asked) == ["search"] and "It does later." in asked.messages[1]["content"]
    assert asked.messages[1]["role"] == "system" and not asked.tool_use.allowed
    inline = parse(tools=tools[:1], messages=[user("Hi"), added("new", **tool("new"))])
    assert shown(inline) == ["search"] and "It does new." in inline.messages[1]["content"]
    assert "new" in inline.tool_use.schemas
    gone = [user("Hi"), added("search", "tool_removal")]
    assert parse(tools=tools, messages=gone).tool_use.allowed == {"later"}
    assert not parse(tools=tools, messages=[*gone, added("search")]).tool_use.allowed
    path = r"messages\[1\]\.content\[0\]\.tool\.definition"
    with pytest.raises(InvalidRequest, match=f"^{path}.input_schema is missing"):
        parse(messages=[user("Hi"), added("new", name="new")])
    with pytest.raises(InvalidRequest, match=f"^{path} must be an object"):
        parse(messages=[user("Hi"), {"role": "system", "content": [
            {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": 7}}]}])  # fmt: skip


def test_a_reminder_for_one_turn_is_gone_with_the_next() -> None:
    """Its place in the list stays, as its client has to send it again."""
    note = {"role": "system", "content": "Keep it short.", "clear_at": "next_user_message"}
    assert [one["role"] for one in parse(messages=[user("Hi"), note]).messages] == ["user", "system"]
    more = parse(messages=[user("Hi"), note, user("And?"), {**note, "clear_at": "never"}])
    assert [one["role"] for one in more.messages] == ["user", "user", "system"]
    assert more.unknown == ()


def test_blocks_that_only_mark_a_place_are_not_shown() -> None:
    """A failed compaction, another model's turn; a compaction's changes of tools are."""
    marks = [{"type": "compaction", "content": None}, {"type": "fallback", "from": {}, "to": {}}]
    assert parse(messages=[user([*marks, {"type": "text", "text": "Hi"}])]).messages[0]["content"] == "Hi"
    change = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "later"}}
    summary = {"type": "compaction", "content": "They met.", "tool_changes": [change]}
    tools = [tool("later", defer_loading=True)]
    said = parse(tools=tools, messages=[user([summary, {"type": "text", "text": "Hi"}])]).messages[0]["content"]
    assert said.startswith("\nThey met.\n") and "It does later." in said


def test_examples_of_inputs_are_in_the_schema() -> None:
    """They are text that the model should see."""
    (one,) = parse(tools=[tool("find", input_examples=[{"of": "rain"}])], messages=[user("Hi")]).tool_use.tools
    assert one["function"]["parameters"] == {"type": "object", "examples": [{"of": "rain"}]}


def test_what_would_lose_a_conversation_is_refused() -> None:
    """A thread's earlier messages are elsewhere, and a compaction is another kind of answer."""
    for field, value in (("thread", {"type": "create"}), ("compaction", {"type": "summarize"})):
        with pytest.raises(InvalidRequest, match=f"^{field} is not supported by this version; use "):
            parse(messages=[user("Hi")], **{field: value})
    fields = {"model": "demo", "messages": [user("Hi")], "compaction": {"type": "summarize"}}
    assert parse_count(json.dumps(fields).encode()).unknown == ()
    assert parse(messages=[user("Hi")], fallbacks="default", thinking={"type": "between_tools"}).thinking["thinking"]
