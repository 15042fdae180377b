"""Pulls between real replicas: a hot prefix spreads by copying, and a killed holder costs time only."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator

import httpx
import pytest

from benchmarks.common.prompts import text_of
from benchmarks.common.server import instance
from serve_app.checkpoints.checkpoint import resolve_model
from tests.integration.conftest import eventually, let_the_feed_arrive, replicas_of

pytestmark = pytest.mark.integration

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Two replicas of the demo model in float32."""
    with instance("--set", "dtype=float32") as base:
        yield base


def text(tokens: int, seed: int) -> str:
    return text_of(tokens, resolve_model("demo"), seed)


def body(system: str, question: str, **extra: object) -> dict[str, object]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return {"model": "demo", "temperature": 0, "max_tokens": 6, "messages": messages, **extra}


def pulls(url: str, outcome: str) -> float:
    """How many pulls of all replicas ended that way."""
    return counted(url, rf'total{{.*outcome="{outcome}".*')


def counted(url: str, name: str) -> float:
    """The sum of a counter of pulls over all replicas."""
    metrics = httpx.get(f"{url}/metrics", timeout=30).text
    return sum(map(float, re.findall(rf"^warmpath_kv_pulls_{name}}} (\S+)$", metrics, re.MULTILINE)))


def test_a_killed_holder_costs_time_only(url: str) -> None:
    """SIGKILL while the other replica waits for its blocks: every request is answered, as if nothing had been."""
    system = text(10_000, 2)
    # So much work that some of it leaves the holder, whatever a pull or the prefix itself costs.
    questions = [text(1500, 200 + n) for n in range(10)]

    async def run() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:

            async def ask(question: str, **extra: object) -> object:
                answer = await client.post(CHAT, json=body(system, question, **extra))
                assert answer.status_code == 200, answer.text
                return answer.json()["choices"]

            before = {name: replica["blocks"].get("pool", 0) for name, replica in replicas_of(url).items()}
            await ask("first")
            await asyncio.to_thread(let_the_feed_arrive)
            after = replicas_of(url)
            holder = max(before, key=lambda name: after[name]["blocks"].get("pool", 0) - before[name])
            pid, begun = int(replicas_of(url)[holder]["pid"]), counted(url, "begun_total{.*")
            os.kill(pid, signal.SIGSTOP)  # so that it cannot hand over anything before it is killed
            try:
                pending = [asyncio.create_task(ask(question)) for question in questions]
                await asyncio.to_thread(eventually, lambda: counted(url, "begun_total{.*") > begun)
            finally:
                os.kill(pid, signal.SIGKILL)
            answers = await asyncio.gather(*pending)
            await asyncio.to_thread(eventually, lambda: pulls(url, "holder_lost") + pulls(url, "late") > 0)
            computed = await ask(questions[-1], cache_salt="alone")
            assert computed == answers[-1]

    asyncio.run(run())
    eventually(lambda: len(replicas_of(url)) == 2, within_s=90)


def test_a_hot_prefix_is_pulled_and_answers_are_equal(url: str) -> None:
    """More requests at once than its holder should serve alone: the other replica copies the prefix, once."""
    system = text(6000, 1)

    async def run() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:

            async def ask(question: int, **extra: object) -> dict[str, object]:
                answer = await client.post(CHAT, json=body(system, text(1500, 100 + question), **extra))
                assert answer.status_code == 200, answer.text
                found: dict[str, object] = answer.json()
                return found

            await ask(0)
            await asyncio.to_thread(let_the_feed_arrive)
            answers = await asyncio.gather(*(ask(question) for question in range(1, 13)))
            cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]  # type: ignore[index]
            assert min(cached) >= 6000 - 16, cached
            await asyncio.to_thread(eventually, lambda: pulls(url, "whole") == 1)
            for question, answer in list(enumerate(answers, 1))[-2:]:
                computed = await ask(question, cache_salt=f"alone {question}")
                assert computed["choices"] == answer["choices"]

    asyncio.run(run())
