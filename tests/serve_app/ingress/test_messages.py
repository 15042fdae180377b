"""Anthropic's messages over a real socket with the real client; the model's text is scripted."""

import json
import threading
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic
from anthropic.types import Message

from serve_app.api.agent_rules import by_rules
from serve_app.api.request import ChatRequest
from serve_app.config.tenants import TenantConfig
from serve_app.errors import GenerationFailed, Overloaded, RequestTooLarge
from serve_app.ingress import entrance
from serve_app.tenants import make_api_key
from tests.serve_app.ingress.scripted import Script, scripted
from tests.serve_app.tool_templates.families import WEATHER, call_text, family

TOOL: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": WEATHER["function"]["parameters"],
}
CALL = call_text("get_weather", {"city": "Oslo"}, "hermes")
MARK: dict[str, Any] = {"type": "ephemeral"}
RULES = "You are a careful clerk. Name the clause, the date and the amount before any advice. " * 4
HI: list[Any] = [{"role": "user", "content": "Hi"}]


def ask(client: Anthropic, **fields: Any) -> Any:
    return client.messages.create(**{"model": "demo", "max_tokens": 5, "messages": HI, **fields})


def test_text_in_text_out(anthropic_client: Anthropic, script: Script) -> None:
    """Every field of the SDK's type is there; the answer names the stop sequence that ended it."""
    script.text = "It rains. END of it"
    raw = anthropic_client.messages.with_raw_response.create(
        model="demo", max_tokens=50, system="Be brief.", messages=HI, stop_sequences=["END"]
    )
    message = Message.model_validate_json(raw.http_response.content)
    assert raw.headers["request-id"] == raw.headers.get("x-request-id", "")
    assert message.id.startswith("msg_")
    assert message.content[0].to_dict() == {"type": "text", "text": "It rains. ", "citations": None}
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")
    usage, ids = message.usage, script.asked[-1].token_ids
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (16, 0)
    assert usage.input_tokens == len(ids) - 16
    asked, fields = len(script.asked), {"model": "demo", "system": "Be brief.", "messages": HI}
    assert anthropic_client.messages.count_tokens(**fields).input_tokens == len(ids)  # type: ignore[arg-type]
    assert len(script.asked) == asked, "counting generates nothing"


def test_the_client_builds_a_stream(anthropic_client: Anthropic, script: Script) -> None:
    """Text is followed by a call; its result goes back in the next turn."""
    script.text = "Let me look. " + CALL
    with anthropic_client.messages.stream(model="demo", max_tokens=50, messages=HI, tools=[TOOL]) as stream:  # type: ignore[list-item]
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert (kinds[0], kinds[-1], message.stop_reason) == ("message_start", "message_stop", "tool_use")
    said, call = message.content
    assert said.type == "text"
    assert call.type == "tool_use" and call.id.startswith("toolu_")
    assert (call.name, call.input) == ("get_weather", {"city": "Oslo"})
    script.text = "Wet."
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"}]}
    turns = [*HI, {"role": "assistant", "content": message.content}, result]
    assert ask(anthropic_client, messages=turns, tools=[TOOL]).content[0].text == "Wet."
    assert "rain" in script.prompt()
    assert "Oslo" in script.prompt()


def test_the_marks_of_anthropics_example(anthropic_client: Anthropic, script: Script) -> None:
    """A marked system prompt and a marked turn are kept, to the token; cached tokens are not written again."""
    script.text = "Yes."
    rules = {"type": "text", "text": RULES, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    usage = ask(
        anthropic_client,
        system=[{"type": "text", "text": "You are an AI assistant."}, rules],
        messages=[{"role": "user", "content": [{"type": "text", "text": RULES, "cache_control": MARK}]}],
    ).usage
    hour, minutes = script.asked[-1].saves
    assert (hour.ttl_s, minutes.ttl_s) == (3600.0, 300.0)
    ids = script.asked[-1].token_ids.tolist()
    assert script.tokenizer.decode(ids[: hour.tokens + 16]).count("before any advice") == 4
    assert 16 < hour.tokens < minutes.tokens <= len(ids)
    assert usage.cache_creation.ephemeral_1h_input_tokens == hour.tokens - 16
    assert usage.cache_creation.ephemeral_5m_input_tokens == minutes.tokens - hour.tokens
    assert usage.input_tokens == len(ids) - minutes.tokens
    assert not any(save.key for save in script.asked[-1].saves)


def test_marks_on_tools_and_automatic_ones(anthropic_client: Anthropic, script: Script) -> None:
    """A tool's mark covers tools and system prompt; the body's own mark covers up to the last block."""
    script.text = "Yes."

    def kept(**fields: Any) -> Any:
        ask(anthropic_client, **fields)
        return script.asked[-1].saves

    marked = {"system": RULES, "tools": [{**TOOL, "cache_control": MARK}]}
    (of_tools,) = kept(**marked)
    first, last = kept(**marked, messages=[{"role": "user", "content": RULES}], cache_control=MARK)
    assert first == of_tools
    assert last.tokens > first.tokens
    assert all(mark.tokens >= 16 for mark in kept(cache_control=MARK))
    assert kept(**marked, extra_body={"store_kv": False}) == ()


def test_diagnostics_name_changes_of_a_tenants_own_messages(demo_model_path: Path, tmp_path: Path) -> None:
    """A continued conversation has none; another tenant's message is treated like an unknown one."""
    keys = {name: make_api_key() for name in ("acme", "zeta")}
    customers = [TenantConfig(name=name, key_sha256=[digest]) for name, (_, digest) in keys.items()]
    with scripted(family("hermes", demo_model_path, tmp_path / "hermes"), customers=customers) as (url, _):

        def told(name: str, previous: str | None, system: str = "One", messages: Any = HI) -> Any:
            body = {
                "model": "demo", "max_tokens": 5, "system": system, "messages": messages,
                "diagnostics": {"previous_message_id": previous},
            }  # fmt: skip
            answer = httpx.post(f"{url}/v1/messages", json=body, headers={"x-api-key": keys[name][0]})
            found = answer.raise_for_status().json()
            return found["id"], found["diagnostics"] and found["diagnostics"]["cache_miss_reason"]["type"]

        first, reason = told("acme", None)
        longer = [*HI, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And?"}]
        assert reason is told("acme", first, messages=longer)[1] is None
        assert told("acme", first, "Two", longer)[1] == "system_changed"
        assert told("zeta", first)[1] == told("zeta", "msg_0")[1] == "previous_message_not_found"


def test_diagnostics_say_where_a_prompt_differs(anthropic_client: Anthropic, script: Script) -> None:
    """Whole and streamed answers have the class of the first difference from the tenant's own prompts."""
    script.text = "Yes."
    asked: dict[str, Any] = {"extra_body": {"diagnostics": {"previous_message_id": None}}}
    for turn, stream in (("1", False), ("2", False), ("3", True)):
        answer = ask(anthropic_client, system=f"Turn {turn} of many. {RULES}", stream=stream, **asked)
        shown = (list(answer)[-2] if stream else answer).model_dump()["diagnostics"]
        if turn != "1":
            details = shown["cache_miss_reason"]["details"]
            assert (shown["cache_miss_reason"]["type"], details["reason"]) == ("unavailable", "id")
            assert (details["first_difference"]["part"], details["first_difference"]["found"]) == ("system", turn)


def test_errors_are_the_clients_own(anthropic_client: Anthropic, script: Script) -> None:
    """They may occur before an answer, in the middle of one, and on an unknown path."""
    with pytest.raises(anthropic.NotFoundError) as missing:
        ask(anthropic_client, model="other")
    assert missing.value.request_id is not None
    assert json.loads(missing.value.response.content)["error"]["type"] == "not_found_error"
    for fails, status, kind in (
        (Overloaded("Full."), 529, "overloaded_error"),
        (RequestTooLarge("Long."), 413, "request_too_large"),
        (GenerationFailed("Broken."), 500, "api_error"),
    ):
        script.fails = fails
        with pytest.raises(anthropic.APIStatusError, match=str(fails)) as failed:
            ask(anthropic_client)
        assert failed.value.status_code == status
        assert json.loads(failed.value.response.content)["error"]["type"] == kind
    script.text = "It rains"
    with pytest.raises(anthropic.APIStatusError, match="Broken"):
        list(ask(anthropic_client, stream=True))
    url = f"{str(anthropic_client.base_url).rstrip('/')}/v1/messages"
    lost = httpx.get(f"{url}/batches")
    assert (lost.status_code, lost.json()["error"]["type"]) == (404, "not_found_error")
    assert lost.headers["request-id"] == lost.json()["request_id"]
    both = {"x-api-key": "one", "authorization": "Bearer two"}
    refused = httpx.post(url, headers=both, json={})
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")


def test_the_answer_names_the_rules_for_its_prompt(hermes: tuple[str, Script], script: Script) -> None:
    """In every API, and in counts of tokens; without one, there is no header."""
    script.text = "Yes."
    snapshot = "Git snapshot at conversation start. Frozen.\n```text\ngit: Status:\n```\n"
    line = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1;"}
    system = {"role": "system", "content": f"Be brief.\n{snapshot}Be kind."}
    for path, fields, rules in (
        ("messages", {"max_tokens": 5, "system": [line], "messages": HI}, "billing_line"),
        ("messages/count_tokens", {"system": [line], "messages": HI}, "billing_line"),
        ("messages", {"max_tokens": 5, "messages": HI, "stream": True}, None),
        ("chat/completions", {"messages": [system, *HI], "stream": True}, "git_snapshot"),
        ("responses", {"instructions": system["content"], "input": "Hi", "store": False}, "git_snapshot"),
    ):
        answer = httpx.post(f"{hermes[0]}/v1/{path}", json={"model": "demo", **fields}, timeout=60)
        assert answer.status_code == 200
        assert answer.headers.get("x-warmpath-prompt-rules") == rules
    assert script.prompt().index("Be kind.") < script.prompt().index("Hi") < script.prompt().index("Git snapshot")


def test_the_rules_look_at_a_long_prompt_outside_the_loop(
    hermes: tuple[str, Script], script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And at a short one in it, where a thread would cost more."""
    threads: list[str] = []

    def seen(request: ChatRequest, *, follow: bool) -> ChatRequest:
        threads.append(threading.current_thread().name.partition("_")[0])
        return by_rules(request, follow=follow)

    monkeypatch.setattr(entrance, "by_rules", seen)
    for chars in (100_000, 10):
        body = {"model": "demo", "max_tokens": 5, "system": "a" * chars, "messages": HI}
        assert httpx.post(f"{hermes[0]}/v1/messages/count_tokens", json=body, timeout=60).status_code == 200
    assert threads[0] == "prepare" and threads[1] != "prepare"


def test_advice_is_told_once_a_session(demo_model_path: Path, tmp_path: Path) -> None:
    """In the header of the answer after the miss, with the client's own setting if the rule is off; streamed or not.

    docs: misses
    """
    path = family("hermes", demo_model_path, tmp_path / "hermes")

    def told(url: str, session: str, top: str, *, stream: bool = True) -> str:
        system = [{"type": "text", "text": text} for text in (top, RULES)]
        body = {"model": "demo", "max_tokens": 5, "system": system, "messages": HI, "stream": stream}
        headers = {"x-claude-code-session-id": session} if session else {}
        answer = httpx.post(f"{url}/v1/messages", json=body, headers=headers, timeout=60)
        return str(answer.headers.get("x-warmpath-advice", ""))

    def heard(url: str, session: str, top: str) -> str:
        """Ask until the explanation, which is made beside the answers, has been told."""
        answers = (told(url, session, top) for _ in range(1000))
        return next(filter(None, answers))

    lines = [f"x-anthropic-billing-header: cc_version=1; cch={at};" for at in range(4)]
    with scripted(path, agent_prompt_rules=False) as (url, script):
        script.text = "Yes."
        assert [told(url, "one", line) for line in lines[:2]] == ["", ""], "a miss is explained after its answer began"
        advice = heard(url, "one", lines[1])
        assert "Set agent_prompt_rules: billing_line may keep this prefix." in advice
        assert "CLAUDE_CODE_ATTRIBUTION_HEADER=0" in advice and " in the system prompt, line " in advice
        assert [told(url, "one", line, stream=stream) for line in lines[2:] for stream in (True, False)] == [""] * 4
        assert "billing_line" in heard(url, "two", "x-anthropic-billing-header: cc_version=2;"), "of another session"
    with scripted(path) as (url, script):
        script.text = "Yes."
        days = [f"Today is 2026-11-{day}." for day in (21, 22, 23)]
        assert [told(url, "", day) for day in days[:2]] == ["", ""]
        said = heard(url, "", days[1])
        assert said.startswith("a date or time changes in the system prompt, line ") and "agent_prompt" not in said


def test_a_miss_names_the_rule_that_is_off(demo_model_path: Path, tmp_path: Path) -> None:
    """The reason's remedy names the setting first, where a client's own text broke the prefix."""
    path = family("hermes", demo_model_path, tmp_path / "hermes")
    with scripted(path, agent_prompt_rules=False) as (url, script):
        script.text = "Yes."
        for change, missed in (("(clean)", False), ("M a.txt", True)):
            snapshot = f"Git snapshot at conversation start. Frozen.\n```text\ngit: {change}\n```\n"
            messages = [{"role": "system", "content": snapshot + RULES}, *HI]
            body = {"model": "demo", "messages": messages, "cache_diagnostics": True}
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
            assert "x-warmpath-prompt-rules" not in answer.headers
            told = answer.json()["usage"]["prompt_tokens_details"].get("cache_miss", {}).get("remedy", "")
            assert told.startswith("Set agent_prompt_rules: git_snapshot ") == missed
