"""What a request and a streamed token cost in the ingress, counted in calls, which no other load on a machine changes.

A token: from a replica's message on, its text, event, counts, and one write to the connection.
"""

import asyncio
import sys
from collections import Counter
from types import FrameType
from typing import Any

import httpx
import pytest

from tests.serve_app.ingress.scripted import PATIENCE_S, Script

MOST_PYTHON, MOST_C = 14.5, 16.0
"""Calls a token. Lower them with each gain; a new feature's cost belongs to its request."""
MOST_OF_A_REQUEST, REQUESTS = 1060, 20
"""Calls of Python's functions by a short chat, without the event loop's own, which is another one in production."""


def calls_of(url: str, script: Script, tokens: int) -> Counter[str]:
    """Return the calls of Python's functions and of C's while an answer's tokens are written, without the script's."""
    counts: Counter[str] = Counter()
    generate = script.generate

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_call") and "/tests/" not in frame.f_code.co_filename:
            counts[event] += 1

    async def counted(*arguments: Any, **named: Any) -> Any:
        sys.setprofile(count)
        try:
            async for output in generate(*arguments, **named):
                yield output
        finally:
            sys.setprofile(None)

    script.generate = counted  # type: ignore[method-assign]
    try:
        script.text, script.step = " the" * tokens, 1
        asked = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": 1000}
        text = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=PATIENCE_S).raise_for_status().text
    finally:
        script.generate = generate  # type: ignore[method-assign]
    assert text.count("data: ") > tokens
    return counts


def test_a_token_takes_few_calls(hermes: tuple[str, Script], script: Script) -> None:
    """The difference of two answers' lengths: what comes once an answer is left out."""
    url, _ = hermes
    calls_of(url, script, 10)
    few, many = (calls_of(url, script, tokens) for tokens in (100, 300))
    taken = {event: (many[event] - few[event]) / 200 for event in ("call", "c_call")}
    assert 1.0 < taken["call"] <= MOST_PYTHON, taken
    assert 1.0 < taken["c_call"] <= MOST_C, taken


def test_a_request_takes_few_calls(hermes: tuple[str, Script], script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """Routes, body, template, tokens, limits, the head of the answer and its one event; the replica is scripted."""
    url, _ = hermes
    loops: list[asyncio.AbstractEventLoop] = []
    calls = 0
    generate = script.generate

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        path = frame.f_code.co_filename
        calls += event == "call" and "/asyncio/" not in path and "/tests/" not in path

    async def seen(*arguments: Any, **named: Any) -> Any:
        loops.append(asyncio.get_running_loop())
        async for output in generate(*arguments, **named):
            yield output

    def watch(by: Any) -> None:
        async def begin_or_end() -> None:
            sys.setprofile(by)

        asyncio.run_coroutine_threadsafe(begin_or_end(), loops[0]).result(PATIENCE_S)

    def ask(number: int) -> None:
        messages = [{"role": "system", "content": "You help. " * 30}, {"role": "user", "content": f"Hi {number}"}]
        asked = {"model": "demo", "messages": messages, "stream": True, "max_tokens": 1}
        client.post("/v1/chat/completions", json=asked, timeout=PATIENCE_S).raise_for_status()

    script.text, script.step = " the", 1
    monkeypatch.setattr(script, "generate", seen)
    with httpx.Client(base_url=url) as client:
        for number in range(5):
            ask(number)
        watch(count)
        try:
            for number in range(REQUESTS):
                ask(100 + number)
        finally:
            watch(None)
    assert 100 < calls / REQUESTS <= MOST_OF_A_REQUEST, calls / REQUESTS
