"""Pulls between two replicas of vLLM over HTTP: copies replace computing, and clients that leave leave nothing."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest

from benchmarks.common.prompts import text_of
from benchmarks.common.server import instance
from serve_app.checkpoints.sources import resolve_model
from tests.integration.conftest import PATIENCE_S, eventually, wait_for_replicas, wait_until_cached

CHAT = "/v1/chat/completions"
PREFIX_TOKENS = 3000
TRIES = 8
"""On a stalled machine a pull may be late, which is right: then another prefix is requested."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Two replicas of the demo model in float32, with pools of eight thousand tokens; requests go in turn."""
    settings = (
        "dtype=float32",
        "replicas=2",
        "kv_cache_bytes=134217728",
        "enforce_eager=true",
        "max_model_len=4096",
        "policy=round_robin",
        "kv_pull=true",
    )
    with instance("--model", "demo", "--engine", "vllm", *(f"--set={setting}" for setting in settings)) as base:
        wait_for_replicas(base, 2)
        yield base


def body(seed: int, question: str = "What is a mast?", **extra: object) -> dict[str, Any]:
    system = text_of(PREFIX_TOKENS, resolve_model("demo"), seed)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return {"model": "demo", "temperature": 0, "max_tokens": 8, "messages": messages, **extra}


async def ask(client: httpx.AsyncClient, request: dict[str, Any]) -> dict[str, Any]:
    answer = await client.post(CHAT, json=request)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def cached(answer: dict[str, Any]) -> int:
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def pulls(url: str, outcome: str = "") -> tuple[float, float]:
    """Return the numbers of begun and ended pulls of all replicas; of one outcome, if it is given."""
    metrics = httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text

    def total(name: str) -> float:
        return sum(map(float, re.findall(rf"^warmpath_kv_pulls_{name} (\S+)$", metrics, re.MULTILINE)))

    return total(r"begun_total{.*}"), total(rf'total{{.*outcome="{outcome or ".*"}".*}}')


def run(url: str, work: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    """Do the work, and check that no block stays in use: otherwise vLLM would not forget them."""

    async def inside() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
            await work(client)

    asyncio.run(inside())
    eventually(lambda: bool(httpx.post(f"{url}/reset_prefix_cache", timeout=PATIENCE_S).json()["complete"]))


async def computed_by_one(url: str, client: httpx.AsyncClient, seed: int) -> None:
    """Compute a prefix, and wait until the router knows it."""
    await ask(client, body(seed, "first"))
    await asyncio.to_thread(wait_until_cached, url, body(seed), PREFIX_TOKENS - 64)


def test_a_prefix_is_copied_and_the_answer_is_the_computed_one(url: str) -> None:
    """One replica computes it; the other's first request for it begins with a copy of it, and reports that."""

    async def work(client: httpx.AsyncClient) -> None:
        for seed in range(100, 100 + TRIES):
            await computed_by_one(url, client, seed)
            _, whole = await asyncio.to_thread(pulls, url, "whole")
            answers = [await ask(client, body(seed)) for _ in range(2)]  # one to each
            if (await asyncio.to_thread(pulls, url, "whole"))[1] > whole:
                break
        else:
            pytest.fail("no pull in time")
        assert min(map(cached, answers)) >= PREFIX_TOKENS - 64
        assert answers[0]["choices"] == answers[1]["choices"]
        computed = await ask(client, body(seed, cache_salt="alone"))
        assert cached(computed) == 0
        assert computed["choices"] == answers[0]["choices"]

    run(url, work)


def test_clients_that_leave_in_the_middle_leave_nothing(url: str) -> None:
    """They leave at any moment of a copy; the next request gets its undisturbed answer."""

    async def work(client: httpx.AsyncClient) -> None:
        before, _ = await asyncio.to_thread(pulls, url)
        for number, delay_s in enumerate((0.02, 0.1, 0.3, 0.6, 1.0, 1.5)):
            seed = 200 + number
            await computed_by_one(url, client, seed)
            asked = [asyncio.create_task(ask(client, body(seed))) for _ in range(2)]
            await asyncio.sleep(delay_s)
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            again = await ask(client, body(seed))
            computed = await ask(client, body(seed, cache_salt="alone"))
            assert again["choices"] == computed["choices"]
        begun, _ = await asyncio.to_thread(pulls, url)
        assert begun > before
        await asyncio.to_thread(eventually, lambda: len(set(pulls(url))) == 1)

    run(url, work)
