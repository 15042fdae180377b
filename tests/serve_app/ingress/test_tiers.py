"""Service tiers and priorities over a real socket with the real clients; the model's text is scripted."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI

from tests.serve_app.ingress.scripted import PATIENCE_S, Script

HI: list[Any] = [{"role": "user", "content": "Hi"}]
PLACES = 8


def chat(client: OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(model="demo", messages=HI, **fields)


@pytest.mark.parametrize(
    ("asked", "served"), [("auto", "default"), ("default", "default"), ("flex", "flex"), ("priority", "priority")]
)
def test_answers_say_which_tier_was_served(client: OpenAI, script: Script, asked: Any, served: str) -> None:
    """Chats report it, whole and in every chunk; completions have no such field, messages one tier. (docs: api)"""
    script.text = "It rains."
    assert chat(client, service_tier=asked).service_tier == served
    chunks = list(chat(client, service_tier=asked, stream=True, stream_options={"include_usage": True}))
    assert {chunk.service_tier for chunk in chunks} == {served}
    fields: dict[str, Any] = {"model": "demo", "input": "Hi", "service_tier": asked}
    assert client.responses.create(**fields).service_tier == served
    events = list(client.responses.create(**fields, stream=True))
    assert events[0].response.service_tier == events[-1].response.service_tier == served
    completion = client.completions.create(model="demo", prompt="Hi", extra_body={"service_tier": asked})
    assert "service_tier" not in completion.to_dict()


def test_without_a_requested_tier_none_is_reported(client: OpenAI, script: Script) -> None:
    """This is as in OpenAI's API; a response always has the field."""
    script.text = "It rains."
    assert "service_tier" not in chat(client).to_dict()
    assert client.responses.create(model="demo", input="Hi").service_tier == "default"
    assert [generation.order for generation in script.asked[-2:]] == [0, 0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tier", ["auto", "standard_only"])
def test_messages_are_standard(anthropic_client: Anthropic, script: Script, tier: Any, stream: bool) -> None:
    script.text = "It rains."
    fields: dict[str, Any] = {"model": "demo", "max_tokens": 5, "messages": HI, "service_tier": tier}
    if stream:
        with anthropic_client.messages.stream(**fields) as events:
            message = events.get_final_message()
    else:
        message = anthropic_client.messages.create(**fields)
    assert message.usage.service_tier == "standard"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"service_tier": "fast"}, "service_tier must be auto, default, flex or priority."),
        ({"service_tier": 1}, "service_tier must be auto, default, flex or priority."),
        ({"priority": 0.5}, "priority must be a whole number from -2147483648 to 2147483647."),
        ({"priority": 2**31}, "priority must be a whole number from -2147483648 to 2147483647."),
        ({"priority": "high"}, "priority must be a whole number from -2147483648 to 2147483647."),
    ],
)
def test_an_unknown_tier_is_refused(client: OpenAI, script: Script, fields: dict[str, Any], sentence: str) -> None:
    asks: list[Any] = [
        lambda: chat(client, extra_body=fields),
        lambda: client.responses.create(model="demo", input="Hi", extra_body=fields),
        lambda: client.completions.create(model="demo", prompt="Hi", extra_body=fields),
    ]
    for ask in asks:
        with pytest.raises(openai.BadRequestError) as refused:
            ask()
        assert (refused.value.param, refused.value.body["message"]) == (next(iter(fields)), sentence)  # type: ignore[index]


def test_an_unknown_tier_of_messages_is_refused(anthropic_client: Anthropic, script: Script) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"service_tier must be auto or standard_only\."):
        anthropic_client.messages.create(
            model="demo", max_tokens=5, messages=HI, extra_body={"service_tier": "priority"}
        )


def test_priority_starts_first_and_flex_last(client: OpenAI, script: Script) -> None:
    """All places are taken and requests wait in the ingress: each freed place goes to the most urgent request."""
    script.text, script.ends = "It rains.", asyncio.Semaphore(0)
    assert script.address is not None
    door, before = script.address.models["demo"].front_door, len(script.asked)

    def until(here: int, waiting: int) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while (len(script.asked) - before, door.waiting().total()) != (here, waiting):
            assert time.monotonic() < deadline_s
            time.sleep(0.005)

    line: list[dict[str, Any]] = [
        {"service_tier": "flex", "extra_body": {"priority": -9}}, {"service_tier": "flex"}, {},
        {"extra_body": {"priority": -1}}, {"extra_body": {"priority": 1}}, {"service_tier": "priority"},
    ]  # fmt: skip
    with ThreadPoolExecutor(PLACES + len(line)) as threads:
        try:
            answers = [threads.submit(chat, client) for _ in range(PLACES)]
            until(PLACES, 0)
            for number, fields in enumerate(line, 1):
                answers.append(threads.submit(chat, client, **fields))
                until(PLACES, number)
            for number in range(1, len(line) + 1):
                script.end()
                until(PLACES + number, len(line) - number)
        finally:
            script.end(PLACES + len(line))
        assert [answer.result().service_tier for answer in answers[PLACES:]] == [
            "flex", "flex", None, None, None, "priority",
        ]  # fmt: skip
    flex = 2**32
    assert [made.order for made in script.asked[before + PLACES :]] == [-flex, -1, 0, 1, flex - 9, flex]
