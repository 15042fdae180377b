"""Reasoning over a real socket, with the real clients of three APIs; the model's text is scripted."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from anthropic import Anthropic
from anthropic.types import Message
from openai import OpenAI
from openai.types.responses import Response

from tests.serve_app.ingress.apis import Api, Clients, assert_same_events, every_chat
from tests.serve_app.ingress.scripted import PATIENCE_S, Script, scripted
from tests.serve_app.tool_templates.families import WEATHER, call_text, family

THOUGHT, ANSWER = "Is it wet?\n\nIt may be.", "It rains. END of it"
TEXT = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"
CALL = call_text("get_weather", {"city": "Oslo"}, "hermes")
QUESTION = "What is <think>"
HI: list[Any] = [{"role": "user", "content": QUESTION}]
ASKED: dict[str, Any] = {"model": "demo", "messages": HI}


@pytest.fixture(scope="module")
def hermes(demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Script]]:
    """Replaces the package's fixture: this model reasons."""
    path = family("thinking", demo_model_path, tmp_path_factory.mktemp("family") / "thinking")
    with scripted(path, place="first") as served:
        yield served


@pytest.fixture(autouse=True)
def thinks(script: Script) -> None:
    script.text = TEXT


def parts(message: Any) -> tuple[Any, Any, Any]:
    return message.reasoning_content, message.reasoning, message.content


@pytest.mark.parametrize("step", [1, 1000])
def test_a_chat_has_its_thought_apart(client: OpenAI, script: Script, step: int) -> None:
    """It has both names that clients read, whole and streamed, in each choice; usage counts its tokens."""
    script.step = step
    whole = client.chat.completions.create(**ASKED, n=2, stop="END", logprobs=True)
    said = ANSWER.partition("END")[0]
    for choice in whole.choices:
        assert parts(choice.message) == (THOUGHT, THOUGHT, said)
        told = "".join(token.token for token in choice.logprobs.content)
        assert told.strip() in said
    tokens = len(script.tokenizer.encode(TEXT.partition("\n\nIt rains")[0], b"r" * 16).token_ids)
    assert whole.usage.completion_tokens_details.reasoning_tokens in (2 * tokens, 2 * tokens + 2)
    with client.chat.completions.stream(**ASKED, stop="END", stream_options={"include_usage": True}) as stream:
        chunks = [event.chunk for event in stream if event.type == "chunk"]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    thoughts = [delta.reasoning_content for delta in deltas if hasattr(delta, "reasoning_content")]
    assert ("".join(thoughts), len(thoughts) > 3) == (THOUGHT, True)
    assert "".join(delta.content or "" for delta in deltas) == said
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens in (tokens, tokens + 1)


@pytest.mark.parametrize("step", [1, 1000])
def test_a_chat_may_leave_its_thought_out(client: OpenAI, script: Script, step: int) -> None:
    """Usage still counts it."""
    script.step = step
    extra: Any = {"extra_body": {"include_reasoning": False}}
    whole: Any = client.chat.completions.create(**ASKED, **extra)
    assert (whole.choices[0].message.content, "wet" in whole.to_json()) == (ANSWER, False)
    assert whole.usage.completion_tokens_details.reasoning_tokens > 3
    chunks: Any = list(client.chat.completions.create(**ASKED, **extra, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    assert not any("reasoning" in chunk.to_json() for chunk in chunks)


def test_a_call_follows_a_thought_and_both_go_back(client: OpenAI, script: Script) -> None:
    """The template gets it back, and drops it after the user's next message."""
    script.text = TEXT.replace(ANSWER, CALL)
    choice = client.chat.completions.create(**ASKED, tools=[WEATHER]).choices[0]
    assert (choice.finish_reason, len(choice.message.tool_calls)) == ("tool_calls", 1)
    back = choice.message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": back["tool_calls"][0]["id"], "content": "Heavy rain."}
    turn = [*HI, back, result]
    client.chat.completions.create(model="demo", messages=turn, tools=[WEATHER])
    assert f"<think>\n{THOUGHT}" in script.prompt()
    client.chat.completions.create(model="demo", messages=[*turn, *HI], tools=[WEATHER])
    assert THOUGHT not in script.prompt()


@every_chat
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_a_call_ends_the_thought_that_it_stands_in(clients: Clients, script: Script, api: Api, step: int) -> None:
    """Streamed or not; the tag behind it is left out. Without tools it is part of the thought."""
    script.text, script.step = f"<think>\n{THOUGHT} {CALL}\n</think>\n\n{ANSWER}", step
    for ask in (api.whole, api.streamed):
        answer = ask(clients, **api.user(QUESTION), **api.tools())
        assert (answer.parts[0], {*answer.parts}) == ("thought", {"thought", "call", "text"})
        assert (answer.thought, answer.text, answer.ended) == (THOUGHT, ANSWER, api.ends[2])
        assert answer.calls == [("get_weather", '{"city": "Oslo"}')]
    assert CALL in api.whole(clients, **api.user(QUESTION)).thought
    script.text = f"<think>\nThe word <tool_call> begins a call.\n</think>\n\n{ANSWER}"
    answer = api.whole(clients, **api.user(QUESTION), **api.tools())
    assert (answer.thought, answer.text) == ("The word <tool_call> begins a call.", ANSWER)
    assert answer.ended == api.ends[0]


@every_chat
def test_a_thought_that_is_cut_off_leaves_no_content(clients: Clients, script: Script, api: Api) -> None:
    """The finish reason is the length."""
    script.text, script.reason = TEXT.partition("It may")[0], "length"
    for ask in (api.whole, api.streamed):
        answer = ask(clients, **api.user(QUESTION))
        assert (answer.thought, answer.parts) == ("Is it wet?", ["thought"])
        assert answer.ended == api.ends[1]


@every_chat
def test_events_are_the_same_for_either_path_of_tokens(hermes: tuple[str, Script], script: Script, api: Api) -> None:
    assert_same_events(hermes[0], script, api, **api.user(QUESTION))


@pytest.mark.parametrize("step", [1, 1000])
def test_stop_strings_end_the_content_alone(client: OpenAI, script: Script, step: int) -> None:
    """Neither the thought nor the white space behind it; a call's text is content."""
    script.step = step
    for stop, said in (
        ("e", ANSWER),
        ("\n\n", ANSWER),
        ("It", ""),
        ("may", ANSWER),
        ("rain", "It "),
        (" of it", "It rains. END"),
    ):
        expected = said.partition("e")[0] if stop == "e" else said
        choice = client.chat.completions.create(**ASKED, stop=[stop]).choices[0]
        assert (choice.message.reasoning_content, choice.message.content or "") == (THOUGHT, expected), stop
    script.text = f"  \n{ANSWER}"
    choice = client.chat.completions.create(**ASKED, stop=["\n", "rain"]).choices[0]
    assert (choice.message.content or "").strip() == ""


def test_a_response_has_an_item_for_its_thought(client: OpenAI, script: Script) -> None:
    """Its events have OpenAI's order and types and add up to the whole; the item may be sent back."""
    script.step = 1
    events = list(client.responses.create(model="demo", input="Rain?", stream=True))
    kinds = [event.type for event in events]
    delta, text = "response.reasoning_text.delta", "response.output_text.delta"
    assert [kind for at, kind in enumerate(kinds) if not (kind in (delta, text) and kinds[at - 1] == kind)] == [
        "response.created", "response.in_progress",
        "response.output_item.added", "response.content_part.added", delta, "response.reasoning_text.done",
        "response.content_part.done", "response.output_item.done",
        "response.output_item.added", "response.content_part.added", text, "response.output_text.done",
        "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    for event in events:
        type(event).model_validate(event.to_dict(mode="json"), strict=True)
    assert "".join(event.delta for event in events if event.type == delta) == THOUGHT
    raw = client.responses.with_raw_response.create(model="demo", input="Rain?", reasoning={"effort": "high"})
    whole = Response.model_validate_json(raw.content, strict=True)
    for response in (whole, events[-1].response):
        thought, message = response.output
        assert (thought.content[0].text, message.content[0].text) == (THOUGHT, ANSWER)
        assert response.usage.output_tokens_details.reasoning_tokens > 5
    assert script.prompt().endswith("<think>\n")
    items = [*HI, *(item.model_dump() for item in whole.output), {"role": "user", "content": "So?"}]
    client.responses.create(model="demo", input=items)
    assert ANSWER in script.prompt()
    assert THOUGHT not in script.prompt()


def test_a_message_has_a_block_for_its_thought(anthropic_client: Anthropic, script: Script) -> None:
    """It is streamed with its deltas and a signature, as the SDK builds it; it may be sent back."""
    script.step = 1
    with anthropic_client.messages.stream(
        **ASKED, max_tokens=50, thinking={"type": "enabled", "budget_tokens": 1024}
    ) as stream:
        kinds = [event.delta.type for event in stream if event.type == "content_block_delta"]
        streamed = stream.get_final_message()
    assert list(dict.fromkeys(kinds)) == ["thinking_delta", "signature_delta", "text_delta"]
    assert script.prompt().endswith("<think>\n")
    raw = anthropic_client.messages.with_raw_response.create(**ASKED, max_tokens=50, thinking={"type": "disabled"})
    assert script.prompt().endswith("</think>\n\n")
    whole = Message.model_validate_json(raw.http_response.content)
    for message in (whole, streamed):
        thought, said = message.content
        assert (thought.thinking, bool(thought.signature), said.text) == (THOUGHT, True, ANSWER)
    assert whole.usage.output_tokens_details.thinking_tokens > 5
    anthropic_client.messages.create(
        model="demo", max_tokens=5, messages=[*HI, {"role": "assistant", "content": whole.content}, *HI]
    )
    assert ANSWER in script.prompt()


def test_a_grammar_is_held_behind_the_thought(client: OpenAI, script: Script) -> None:
    """An answer to a prompt that opens the thought begins inside it."""
    script.text = f"{THOUGHT}</think>\n" + '{"a": 1}'
    fields = {"response_format": {"type": "json_object"}, "reasoning_effort": "low"}
    message = client.chat.completions.create(**ASKED, **fields).choices[0].message
    assert (message.reasoning_content, json.loads(message.content)) == (THOUGHT, {"a": 1})
    form = json.loads(script.asked[-1].grammar)["grammars"]
    assert "start: " in form[0]["lark_grammar"] and form[1]["name"] == "answer"
    client.chat.completions.create(**ASKED, **{**fields, "reasoning_effort": "none"})
    assert len(json.loads(script.asked[-1].grammar)["grammars"]) == 1


def test_a_model_without_thoughts_says_that_it_was_asked_for_some(demo_model_path: Path) -> None:
    with scripted(demo_model_path) as (url, script), OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
        script.text = "Hello"
        raw = client.chat.completions.with_raw_response.create(**ASKED, reasoning_effort="high")
        assert "thinking" in raw.headers["x-warmpath-warning"]
        with pytest.raises(openai.BadRequestError, match="reasoning_effort must be none, minimal"):
            client.chat.completions.create(**ASKED, reasoning_effort="much")  # type: ignore[call-overload]


def test_a_thought_that_no_template_shows_is_named(demo_model_path: Path, hermes: tuple[str, Script]) -> None:
    """It is no reason to refuse a conversation; a template that reads thoughts gets it without a word."""
    said = {"role": "assistant", "content": "Yes.", "reasoning_content": "Is it?"}
    body = {"model": "demo", "messages": [HI[0], said, HI[0]], "max_tokens": 1}
    with scripted(demo_model_path) as (url, _):
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_S).raise_for_status()
        assert answer.headers["x-warmpath-warning"] == "unknown fields ignored: reasoning"
    answer = httpx.post(f"{hermes[0]}/v1/chat/completions", json=body, timeout=PATIENCE_S).raise_for_status()
    assert "x-warmpath-warning" not in answer.headers
