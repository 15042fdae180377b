"""Questions to a cluster with changing replicas, and that cluster's reports.

Pulls by requests are off, so all cached blocks were computed by a request, pre-warmed or handed over.
"""

import asyncio
from collections.abc import Callable, Iterable, Set
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

from benchmarks.common.prompts import text_of
from cluster.local import LocalCluster, application
from serve_app.checkpoints.sources import resolve_model
from serve_app.replay.client import stream_answer
from tests.integration.conftest import HTTP, PATIENCE_S, cache_state, clients, eventually, replicas_of

CHAT = "/v1/chat/completions"
SYSTEM_TOKENS = 400
HELD_TOKENS = SYSTEM_TOKENS - 16
"""The minimum of cached tokens, in whole blocks, of a prompt with a cached system prompt."""
SETTINGS = {
    "model": "demo",
    "engine": "simulated",
    "replicas": 1,
    "kv_pull": False,
    "num_blocks": 2000,
    "simulated_prefill_tokens_per_s": 5000.0,  # 80 ms a prompt, far above the delays of a busy machine
    "graceful_shutdown_timeout_s": 15,
}


def scale(cluster: LocalCluster, replicas: int, *, wait: bool = True, **options: Any) -> None:
    """Deploy with another number of replicas, without restarts; ``options``: other options of that deployment."""
    wanted = application(SETTINGS, {"Replica": {"num_replicas": replicas, **options}})
    cluster.deploy(wanted, PATIENCE_S if wait else 0)


def body(system: str, question: str = "And?", **extra: object) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return {"model": "demo", "temperature": 0, "seed": 7, "max_tokens": 6, "messages": messages, **extra}


def texts(count: int, seed: int, tokens: int = SYSTEM_TOKENS) -> list[str]:
    return [text_of(tokens, resolve_model("demo"), seed + number) for number in range(count)]


def ask(url: str, request: dict[str, Any]) -> tuple[str, int]:
    """Return the answer and the number of cached tokens."""
    answer = HTTP.post(url + CHAT, json=request)
    assert answer.status_code == 200, answer.text
    whole = answer.json()
    return whole["choices"][0]["message"]["content"], whole["usage"]["prompt_tokens_details"]["cached_tokens"]


def ask_at_once(url: str, requests: Iterable[dict[str, Any]]) -> list[tuple[str, int]]:
    """Ask all at once, so that every replica gets some."""
    with ThreadPoolExecutor(32) as pool:
        return list(pool.map(partial(ask, url), requests))


def notices(url: str, kind: str) -> dict[str, dict[str, Any]]:
    """Return finished receipts from the notices, by replica."""
    receipts = cache_state(url)["notices"][kind]
    return {receipt["replica_id"]: receipt for receipt in receipts if receipt["state"] == "done"}


def wait_left(url: str, names: Set[str]) -> None:
    """Wait until replicas have left and their receipts are published."""
    eventually(lambda: names <= notices(url, "handover").keys() and not names & replicas_of(url).keys())


def long_streams(url: str, seed: int, max_tokens: int, disturb: Callable[[], None] | None = None) -> list[str]:
    """Return six answers of 20 ms a token; ``disturb`` is called once every replica is at work on one."""
    requests = [body(text, max_tokens=max_tokens, temperature=1.0) for text in texts(6, seed)]

    async def run() -> list[str]:
        async with clients(url) as client:
            streams = [asyncio.create_task(stream_answer(client, CHAT, request)) for request in requests]
            if disturb is not None:
                await asyncio.to_thread(eventually, lambda: all(running(url).values()))
                await asyncio.to_thread(disturb)
            return [answer.text for answer in await asyncio.gather(*streams)]

    return asyncio.run(run())


def running(url: str) -> dict[str, int]:
    """Return the number of running sequences, by replica."""
    return {name: replica["running_sequences"] for name, replica in replicas_of(url).items()}


@cache
def undisturbed(url: str, seed: int, max_tokens: int) -> list[str]:
    """Return those answers with no replica leaving; they do not depend on the number of replicas."""
    return long_streams(url, seed, max_tokens)
