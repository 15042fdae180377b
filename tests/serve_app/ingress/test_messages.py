"""Anthropic's messages over a real socket with the real client; the model's text is given."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic
from anthropic.types import Message

from serve_app.config.tenants import TenantConfig
from serve_app.errors import GenerationFailed, Overloaded
from serve_app.tenants.tenants import make_api_key
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


@pytest.fixture(scope="module")
def served(demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Anthropic, Script]]:
    path = family("hermes", demo_model_path, tmp_path_factory.mktemp("family") / "hermes")
    with scripted(path) as (url, script), Anthropic(base_url=url, api_key="k", max_retries=0) as client:
        yield client, script


@pytest.fixture
def client(served: tuple[Anthropic, Script]) -> Anthropic:
    return served[0]


@pytest.fixture
def script(served: tuple[Anthropic, Script]) -> Script:
    served[1].clear()
    return served[1]


def test_text_in_text_out(client: Anthropic, script: Script) -> None:
    """Every field that the SDK's type asks for is there; the answer says which stop sequence ended it."""
    script.text = "It rains. END of it"
    raw = client.messages.with_raw_response.create(
        model="demo", max_tokens=50, system="Be brief.", messages=HI, stop_sequences=["END"]
    )
    message = Message.model_validate_json(raw.http_response.content)
    assert raw.headers["request-id"] == raw.headers.get("x-request-id", "")
    assert message.id.startswith("msg_")
    assert message.content[0].to_dict() == {"type": "text", "text": "It rains. "}
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")
    assert message.usage.cache_read_input_tokens == 16
    assert message.usage.cache_creation_input_tokens == 0
    assert message.usage.input_tokens + 16 == len(script.asked[-1].token_ids)
    assert "Be brief." in script.prompt()


def test_a_stream_is_what_the_client_builds_of_it(client: Anthropic, script: Script) -> None:
    """Text, then a call, whose result goes back in the next turn."""
    script.text = "Let me look. " + CALL
    with client.messages.stream(model="demo", max_tokens=50, messages=HI, tools=[TOOL]) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    said, call = message.content
    assert message.stop_reason == "tool_use"
    assert said.type == "text"
    assert call.type == "tool_use"
    assert call.id.startswith("toolu_")
    assert (call.name, call.input) == ("get_weather", {"city": "Oslo"})
    script.text = "Wet."
    result: dict[str, Any] = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    turns: list[Any] = [
        *HI,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    answer = client.messages.create(model="demo", max_tokens=50, messages=turns, tools=[TOOL])
    assert answer.content[0].to_dict()["text"] == "Wet."
    assert "rain" in script.prompt()
    assert "Oslo" in script.prompt()


def test_the_marks_of_anthropics_example(client: Anthropic, script: Script) -> None:
    """A marked system prompt and a marked turn are kept, each to its token; what was read is not written again."""
    script.text = "Yes."
    answer = client.messages.create(
        model="demo",
        max_tokens=5,
        system=[
            {"type": "text", "text": "You are an AI assistant."},
            {"type": "text", "text": RULES, "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        ],
        messages=[{"role": "user", "content": [{"type": "text", "text": RULES, "cache_control": MARK}]}],
    )
    hour, minutes = script.asked[-1].saves
    assert (hour.ttl_s, minutes.ttl_s) == (3600.0, 300.0)
    ids = script.asked[-1].token_ids.tolist()
    decode = script.tokenizer.decode
    assert decode(ids[: hour.tokens + 16]).count("before any advice") == 4
    assert 16 < hour.tokens < minutes.tokens <= len(ids)
    created = answer.usage.cache_creation
    assert created is not None
    assert created.ephemeral_1h_input_tokens == hour.tokens - 16
    assert created.ephemeral_5m_input_tokens == minutes.tokens - hour.tokens
    assert answer.usage.input_tokens == len(ids) - minutes.tokens
    assert not any(save.key for save in script.asked[-1].saves)


def test_marks_on_tools_and_automatic_ones(client: Anthropic, script: Script) -> None:
    """A tool's leads to the end of tools and system prompt; the body's own to the last block's."""
    script.text = "Yes."
    tools: list[Any] = [{**TOOL, "cache_control": MARK}]
    client.messages.create(model="demo", max_tokens=5, system=RULES, messages=HI, tools=tools)
    (of_tools,) = script.asked[-1].saves
    client.messages.create(
        model="demo", max_tokens=5, system=RULES, messages=[{"role": "user", "content": RULES}],
        tools=tools, cache_control={"type": "ephemeral"},
    )  # fmt: skip
    first, last = script.asked[-1].saves
    assert first == of_tools
    assert last.tokens > first.tokens
    client.messages.create(model="demo", max_tokens=5, messages=HI, cache_control={"type": "ephemeral"})
    assert all(kept.tokens >= 16 for kept in script.asked[-1].saves)
    client.messages.create(
        model="demo", max_tokens=5, system=RULES, messages=HI, tools=tools, extra_body={"store_kv": False}
    )
    assert script.asked[-1].saves == ()


def test_tokens_are_counted_as_they_are_sent(client: Anthropic, script: Script) -> None:
    """With tools and system prompt; nothing is generated."""
    script.text = "Yes."
    fields: dict[str, Any] = {"model": "demo", "messages": HI, "system": RULES, "tools": [TOOL]}
    before = len(script.asked)
    counted = client.messages.count_tokens(**fields).input_tokens
    assert len(script.asked) == before
    client.messages.create(max_tokens=5, **fields)
    assert counted == len(script.asked[-1].token_ids)


def test_diagnostics_name_what_changed(client: Anthropic, script: Script) -> None:
    """Of a message of the same tenant; nothing where the conversation goes on."""
    script.text = "Yes."

    def ask(system: str, *messages: Any, previous: str | None) -> Any:
        extra = {"diagnostics": {"previous_message_id": previous}}
        raw = client.messages.with_raw_response.create(
            model="demo", max_tokens=5, system=system, messages=list(messages), extra_body=extra
        )
        return json.loads(raw.http_response.content)

    first = ask("One", *HI, previous=None)
    assert first["diagnostics"] is None
    longer = (*HI, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And?"})
    assert ask("One", *longer, previous=first["id"])["diagnostics"] is None
    other = ask("Two", *longer, previous=first["id"])["diagnostics"]
    assert other["cache_miss_reason"]["type"] == "system_changed"
    unknown = ask("One", *HI, previous="msg_unknown")["diagnostics"]
    assert unknown["cache_miss_reason"] == {"type": "previous_message_not_found"}


def test_a_tenant_is_compared_with_its_own_messages_alone(demo_model_path: Path, tmp_path: Path) -> None:
    """Another tenant's message is to it like one that never was."""
    keys = {name: make_api_key() for name in ("acme", "zeta")}
    customers = [TenantConfig(name=name, key_sha256=[digest]) for name, (_, digest) in keys.items()]
    with scripted(family("hermes", demo_model_path, tmp_path / "hermes"), customers=customers) as (url, _):

        def ask(name: str, previous: str | None) -> dict[str, Any]:
            body = {"model": "demo", "max_tokens": 5, "messages": HI, "diagnostics": {"previous_message_id": previous}}
            answer = httpx.post(f"{url}/v1/messages", json=body, headers={"x-api-key": keys[name][0]})
            found: dict[str, Any] = answer.raise_for_status().json()
            return found

        first = ask("acme", None)["id"]
        told = ask("zeta", first)["diagnostics"]
        assert told["cache_miss_reason"]["type"] == "previous_message_not_found"
        assert told["cache_miss_reason"] == ask("zeta", "msg_0")["diagnostics"]["cache_miss_reason"]
        assert ask("acme", first)["diagnostics"] is None


def test_diagnostics_say_where_a_prompt_differs(client: Anthropic, script: Script) -> None:
    """Whole, and at a stream's end: the class of the first difference from the tenant's own prompts."""
    script.text = "Yes."
    rules = "Answer in whole sentences, and name the paragraph of the terms that you rest on. " * 12
    asked: dict[str, Any] = {
        "model": "demo", "max_tokens": 5, "messages": HI, "extra_body": {"diagnostics": {"previous_message_id": None}},
    }  # fmt: skip
    client.messages.create(system=f"Turn 1 of many. {rules}", **asked)
    raw = client.messages.with_raw_response.create(system=f"Turn 2 of many. {rules}", **asked)
    reason = json.loads(raw.http_response.content)["diagnostics"]["cache_miss_reason"]
    assert reason["type"] == "unavailable"
    assert (reason["details"]["reason"], reason["details"]["first_difference"]["part"]) == ("id", "system")
    *_, delta, _ = client.messages.create(system=f"Turn 3 of many. {rules}", stream=True, **asked)
    assert delta.model_dump()["diagnostics"]["cache_miss_reason"]["details"]["first_difference"]["found"] == "3"


def test_errors_are_the_clients_own(client: Anthropic, script: Script) -> None:
    """Before an answer, in the middle of one, and on a path that is none."""
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="other", max_tokens=5, messages=HI)
    assert missing.value.request_id is not None
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index, call-overload]
    with pytest.raises(anthropic.BadRequestError, match="thinking is not supported"):
        client.messages.create(
            model="demo", max_tokens=5, messages=HI, thinking={"type": "enabled", "budget_tokens": 1024}
        )
    script.fails = Overloaded("Full.")
    with pytest.raises(anthropic.APIStatusError) as full:
        client.messages.create(model="demo", max_tokens=5, messages=HI)
    assert full.value.status_code == 529
    script.text, script.fails = "It rains", GenerationFailed("Broken.")
    with pytest.raises(anthropic.APIStatusError, match="Broken"):
        list(client.messages.create(model="demo", max_tokens=5, messages=HI, stream=True))
    lost = httpx.get(f"{str(client.base_url).rstrip('/')}/v1/messages/batches")
    assert lost.status_code == 404
    assert lost.json()["error"]["type"] == "not_found_error"
    both = {"x-api-key": "one", "authorization": "Bearer two"}
    refused = httpx.post(f"{str(client.base_url).rstrip('/')}/v1/messages", headers=both, json={})
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
