"""Replicas that join and leave real Ray Serve, with simulated engines: caches, saves and streams survive both.

Pulls by requests are off, so that what is cached came with a pre-warm or a hand-over.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from benchmarks.common.prompts import text_of
from cluster.local import LocalCluster, application
from serve_app.checkpoints.checkpoint import resolve_model
from tests.integration.conftest import (
    PATIENCE_S,
    cache_state,
    eventually,
    replicas_of,
    wait_for_replicas,
    wait_until_cached,
)

pytestmark = pytest.mark.integration

CHAT = "/v1/chat/completions"
SYSTEM_TOKENS = 400
GRACEFUL_S = 15
SETTINGS = {
    "model": "demo",
    "engine": "simulated",
    "replicas": 1,
    "kv_pull": False,
    "num_blocks": 2000,
    "simulated_prefill_tokens_per_s": 50000.0,
    "graceful_shutdown_timeout_s": GRACEFUL_S,
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(1) as made:
        yield made


def scale(cluster: LocalCluster, replicas: int, settings: dict[str, Any] | None = None, *, wait: bool = True) -> None:
    """Deploy with another number of replicas, which restarts none of them."""
    deployments = {"Replica": {"num_replicas": replicas, "autoscaling_config": None}}
    cluster.deploy(application(settings or SETTINGS, deployments), PATIENCE_S if wait else 0)


def body(system: str, question: str = "And?", **extra: object) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return {"model": "demo", "temperature": 0, "seed": 7, "max_tokens": 6, "messages": messages, **extra}


def texts(count: int, seed: int) -> list[str]:
    return [text_of(SYSTEM_TOKENS, resolve_model("demo"), seed + number) for number in range(count)]


def ask(url: str, request: dict[str, Any]) -> tuple[str, int]:
    """Return the answer and how many tokens were cached."""
    answer = httpx.post(url + CHAT, json=request, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return found["choices"][0]["message"]["content"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


def notices(url: str, kind: str) -> dict[str, dict[str, Any]]:
    """Finished receipts on the board, by replica."""
    found = cache_state(url)["notices"][kind]
    return {one["replica_id"]: one for one in found if one["state"] == "done"}


def wait_left(url: str, names: set[str]) -> None:
    """Wait until replicas have gone and their receipts are up."""
    eventually(lambda: names <= notices(url, "handover").keys() and not names & replicas_of(url).keys())


def test_a_new_replica_has_what_its_peer_had_before_its_first_request(cluster: LocalCluster) -> None:
    """The only peer is killed once the new one runs: what is cached then came with the pre-warm."""
    scale(cluster, 1)
    url = cluster.url
    wait_for_replicas(url, 1)
    (old,) = replicas_of(url)
    systems = texts(5, 100)
    answers = [ask(url, body(system))[0] for system in systems]
    wait_until_cached(url, body(systems[-1]), SYSTEM_TOKENS - 16)
    scale(cluster, 2)
    wait_for_replicas(url, 2)
    (new,) = replicas_of(url).keys() - {old}
    receipt = notices(url, "prewarm")[new]
    assert receipt["blocks"] >= 5 * (SYSTEM_TOKENS // 16 - 1)
    assert not receipt["skipped_blocks"]
    assert replicas_of(url)[new]["blocks"]["pool"] >= receipt["blocks"]
    os.kill(int(replicas_of(url)[old]["pid"]), signal.SIGKILL)
    for system, answer in zip(systems, answers, strict=True):
        text, cached = ask(url, body(system))
        assert text == answer
        assert cached >= SYSTEM_TOKENS - 16
    wait_for_replicas(url, 2, [old])


def test_what_a_leaving_replica_held_is_cached_where_it_was_not(cluster: LocalCluster) -> None:
    """Three become one: every prompt is a hit there, a save is still one, and every answer is the same."""
    url = cluster.url
    scale(cluster, 3)
    wait_for_replicas(url, 3)
    systems, saved = texts(12, 200), texts(3, 300)
    save = {"save_system_prompt_kv_cache": True}

    async def all_at_once(requests: list[dict[str, Any]]) -> list[tuple[str, int]]:
        return list(await asyncio.gather(*(asyncio.to_thread(ask, url, request) for request in requests)))

    requests = [body(system) for system in systems] + [body(system, **save) for system in saved]
    answers = asyncio.run(all_at_once(requests))
    assert max(cached for _, cached in answers[:12]) < 64
    for request in requests:
        wait_until_cached(url, request, SYSTEM_TOKENS - 16)
    before = replicas_of(url)
    scale(cluster, 1)
    wait_for_replicas(url, 1)
    (stays,) = replicas_of(url)
    gone = before.keys() - {stays}
    wait_left(url, set(gone))
    receipts = [notices(url, "handover")[name] for name in gone]
    assert sum(receipt["blocks"] for receipt in receipts) > 0
    assert not any(reason != "held_by_peer" for receipt in receipts for reason in receipt["skipped_blocks"])
    assert sum(receipt["saves_lost"] for receipt in receipts) == 0
    again = asyncio.run(all_at_once([body(system) for system in systems + saved]))
    assert [text for text, _ in again] == [text for text, _ in answers]
    assert min(cached for _, cached in again) >= SYSTEM_TOKENS - 16
    eventually(lambda: replicas_of(url)[stays]["blocks_pinned"] >= 3 * (SYSTEM_TOKENS // 16 - 1))
    metrics = httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text
    assert "warmpath_handover_blocks_total" in metrics


def test_a_stream_longer_than_the_drain_goes_on_elsewhere_token_for_token(cluster: LocalCluster) -> None:
    """Its replica is stopped in the middle; the client sees one stream, the one of an undisturbed run."""
    url = cluster.url
    scale(cluster, 2)
    wait_for_replicas(url, 2)
    requests = [body(text, max_tokens=1500, stream=True, temperature=1.0) for text in texts(4, 400)]

    async def read(client: httpx.AsyncClient, request: dict[str, Any]) -> str:
        async with client.stream("POST", CHAT, json=request) as response:
            return "".join([text async for text in response.aiter_lines() if "content" in text])

    async def run(*, disturbed: bool) -> list[str]:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
            streams = [asyncio.create_task(read(client, request)) for request in requests]
            if disturbed:
                await asyncio.to_thread(
                    eventually, lambda: min(r["running_sequences"] for r in replicas_of(url).values()) > 0
                )
                await asyncio.to_thread(scale, cluster, 1, wait=False)
            return list(await asyncio.gather(*streams))

    def contents(lines: list[str]) -> list[str]:

        return ["".join(re.findall(r'"content":"((?:[^"\\]|\\.)*)"', line)) for line in lines]

    before = replicas_of(url)
    disturbed = asyncio.run(run(disturbed=True))
    wait_for_replicas(url, 1)
    wait_left(url, before.keys() - replicas_of(url).keys())
    assert contents(disturbed) == contents(asyncio.run(run(disturbed=False)))
