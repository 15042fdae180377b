"""Requests of agents' real packages, with shortened texts: nothing in them is a 400. (docs: agents)"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from serve_app.api.anthropic.request import parse_messages
from serve_app.api.openai.request import parse_chat
from serve_app.api.openai.responses.request import parse_response_request
from serve_app.api.request import ChatRequest
from serve_app.errors import InvalidRequest

RECORDED = Path(__file__).parents[2] / "clients/requests"
PARSERS = {"claude_code": parse_messages, "codex": parse_response_request, "qwen_code": parse_chat}


def body(agent: str) -> dict[str, Any]:
    recorded: dict[str, Any] = json.loads((RECORDED / f"{agent}.json").read_text())["body"]
    return recorded


def parse(agent: str, **changed: Any) -> ChatRequest:
    return PARSERS[agent](json.dumps({**body(agent), **changed}).encode())


@pytest.mark.parametrize(
    ("agent", "roles", "tools", "ignored"),
    [
        ("claude_code", ["system", "user", "system"], ["Bash", "Write"], []),
        (
            "codex",
            ["system", "system", "user", "user"],
            ["exec_command", "multi_agent_v1.close_agent", "multi_agent_v1.resume_agent"],
            ["tools[].external_web_access", "tools[].web_search"],
        ),
        ("qwen_code", ["system", "user", "assistant", "user"], ["write_file", "run_shell_command"], []),
    ],
)
def test_a_first_request_is_a_conversation_with_tools(
    agent: str, roles: list[str], tools: list[str], ignored: list[str]
) -> None:
    """Each message is in its place; ignored fields are reported, and they all concern tools that we do not run."""
    request = parse(agent)
    assert [message["role"] for message in request.messages] == roles
    assert [tool["function"]["name"] for tool in request.tool_use.tools] == tools
    assert sorted(field.with_meaning for field in request.unknown) == ignored


def test_claude_codes_varying_header_is_no_part_of_the_prompt() -> None:
    """It is the first block of the system prompt; other blocks, and a first block with other words, stay."""
    recorded = body("claude_code")["system"]
    other = copy.deepcopy(recorded)
    other[0]["text"] = "x-anthropic-billing-header: cc_version=2.1.197.74c; cc_entrypoint=sdk-cli;"
    assert other != recorded
    assert parse("claude_code", system=other).messages == parse("claude_code").messages
    assert parse("claude_code", system=recorded[::-1]).messages[0] != parse("claude_code").messages[0]
    assert "billing" in parse("claude_code", system=recorded[::-1]).messages[0]["content"]
    with pytest.raises(InvalidRequest, match=r"^system\[1\] must be a text block"):
        parse("claude_code", system=[recorded[0], {"type": "image"}])


def test_an_edit_of_the_context_is_accepted_and_named() -> None:
    """Claude Code's own edit clears nothing; others are not applied, so the model sees more than was meant."""
    edits = body("claude_code")["context_management"]["edits"]
    assert parse("claude_code").unknown == ()
    for edit in ({**edits[0], "keep": {"type": "thinking_turns", "value": 1}}, {"type": "clear_tool_uses_20250919"}):
        request = parse("claude_code", context_management={"edits": [*edits, edit]})
        assert [field.with_meaning for field in request.unknown] == ["context_management.edits"]
        assert request.repeated["context_management"] == {"applied_edits": []}


def test_an_output_of_no_call_is_the_users_word() -> None:
    """Codex tells a goal so; without a name, or with the last call's, it is that call's result."""
    call = {"type": "function_call", "call_id": "c", "name": "close_agent", "arguments": "", "namespace": "m"}
    for named, said in (
        ({"namespace": "agent", "name": "goal_objective"}, {"role": "user", "content": "agent.goal_objective: win"}),
        ({"namespace": "m", "name": "close_agent"}, {"role": "tool", "content": "win", "tool_call_id": "c"}),
        ({}, {"role": "tool", "content": "win", "tool_call_id": "c"}),
    ):
        request = parse("codex", tools=[], input=[call, {"type": "function_call_output", "output": "win", **named}])
        assert request.messages[-1] == said
        assert request.unknown == ()


def test_a_message_of_a_system_alone_asks_nothing() -> None:
    """A system message may stand anywhere; after a user's it may be the last."""
    with pytest.raises(InvalidRequest, match="messages must hold words of user or assistant"):
        parse("claude_code", messages=[{"role": "system", "content": "Be brief."}])


def test_calls_of_a_namespace_come_back_by_the_name_that_the_model_knows() -> None:
    """Two namespaces may have functions of one name."""
    call = {
        "type": "function_call",
        "call_id": "c",
        "namespace": "multi_agent_v1",
        "name": "close_agent",
        "arguments": "",
    }
    said = parse("codex", input=[*body("codex")["input"], call]).messages[-1]
    assert said["tool_calls"][0]["function"]["name"] == "multi_agent_v1.close_agent"
    (space,) = (tool for tool in body("codex")["tools"] if tool["type"] == "namespace")
    with pytest.raises(InvalidRequest, match=r"input\[4\]\.namespace must be a string"):
        parse("codex", input=[*body("codex")["input"], {**call, "namespace": 7}])
    both = parse("codex", tools=[space, {**space, "name": "other"}]).tool_use.tools
    assert [tool["function"]["name"] for tool in both][::2] == ["multi_agent_v1.close_agent", "other.close_agent"]


@pytest.mark.parametrize(
    ("tool", "sentence"),
    [
        ({"type": "namespace", "tools": []}, r"tools\[0\]\.name is missing"),
        ({"type": "function"}, r"tools\[0\]\.name is missing"),
        (
            {"type": "namespace", "name": "a", "tools": [{"type": "custom", "name": "b"}]},
            r"tools\[0\]\.tools\[0\]\.type",
        ),
        ({"type": "code_interpreter"}, r'tools\[0\]\.type must be "function" or "namespace"'),
        (
            {"type": "namespace", "name": "a", "tools": [{"type": "function", "name": f"f{i}"} for i in range(129)]},
            "tools must hold at most 128 functions",
        ),
    ],
)
def test_a_tool_that_is_not_as_it_should_be_is_named(tool: dict[str, Any], sentence: str) -> None:
    """This also holds within a namespace."""
    with pytest.raises(InvalidRequest, match=sentence):
        parse("codex", tools=[tool])


def test_an_unknown_field_of_a_namespaces_function_is_reported_too() -> None:
    """It is reported by its name, as any other."""
    inner = {"type": "function", "name": "find", "defer_loading": True}
    request = parse("codex", tools=[{"type": "namespace", "name": "a", "tools": [inner]}])
    assert [field.with_meaning for field in request.unknown] == ["tools[].tools[].defer_loading"]


def test_a_call_that_is_demanded_needs_a_tool_of_the_clients() -> None:
    """A search that runs on OpenAI's side does not count."""
    with pytest.raises(InvalidRequest, match="needs tools"):
        parse("codex", tools=[{"type": "web_search"}], tool_choice="required")
