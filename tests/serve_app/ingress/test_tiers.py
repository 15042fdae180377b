"""Priorities over a real socket with the real client; the model's text is scripted."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from openai import OpenAI

from tests.serve_app.ingress.scripted import PATIENCE_S, Script

HI: list[Any] = [{"role": "user", "content": "Hi"}]
PLACES = 8


def chat(client: OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(model="demo", messages=HI, **fields)


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
