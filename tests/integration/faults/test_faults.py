"""Real SIGKILLs, real disconnects, real overload: nothing is lost and nothing leaks."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import httpx
import pytest

from benchmarks.common.client import stream_events
from tests.harness.crashes.processes import ProcessCrashes
from tests.harness.crashes.questions import Questions
from tests.integration.conftest import PATIENCE_S, eventually, replicas_of, wait_for_replicas

pytestmark = pytest.mark.integration

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def body(content: str, **extra: object) -> dict[str, object]:
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 40,
        "temperature": 1.0,
        "seed": 5,
        **extra,
    }


def working(url: str) -> list[str]:
    """The ids of the replicas that run, or have queued, anything."""
    return [
        replica_id
        for replica_id, replica in replicas_of(url).items()
        if replica["running_sequences"] + replica["waiting_sequences"] + replica["queued_prefill_tokens"] > 0
    ]


def kill_replica(url: str, replica_id: str) -> None:
    os.kill(int(replicas_of(url)[replica_id]["pid"]), signal.SIGKILL)


def test_killed_before_the_first_token(url: str) -> None:
    """The request is sent again elsewhere; the client sees one whole answer, equal to an undisturbed one."""
    victims: list[str] = []

    async def run() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
            request = body("word " * 4000)
            undisturbed = (await client.post(CHAT, json={**request, "cache_salt": "other"})).json()
            for salt in "bcdef":  # a machine that stands still may let the answer come before anybody looks
                await asyncio.to_thread(eventually, lambda: not working(url))
                pending = asyncio.create_task(client.post(CHAT, json={**request, "cache_salt": salt}))

                def is_at_work(pending: asyncio.Task[httpx.Response] = pending) -> bool:
                    victims.extend(working(url)[:1])
                    return bool(victims) or pending.done()

                await asyncio.to_thread(eventually, is_at_work)
                if victims:
                    kill_replica(url, victims[0])
                answer = await pending
                assert answer.status_code == 200, answer.text
                assert answer.json()["choices"] == undisturbed["choices"]
                if victims:
                    return
            raise AssertionError("no replica was seen at work")

    asyncio.run(run())
    wait_for_replicas(url, 2, victims)


def test_killed_in_the_middle_of_a_stream(url: str) -> None:
    """The stream goes on from another replica with the very tokens it would have had. (docs/routing.md)"""
    victims: list[str] = []

    async def collect(client: httpx.AsyncClient, kill: bool, salt: str) -> tuple[str, int, int]:
        """Return the text, in how many chunks it came, and how many of them came after the kill, if there was one."""
        text, chunks, killed_at = "", 0, 0
        request = body("tell me", stream=True, max_tokens=100, cache_salt=salt)
        async for event in stream_events(client, CHAT, request):
            text += event["choices"][0]["delta"].get("content") or ""
            chunks += 1
            if kill and chunks >= 10 and not killed_at:
                busy = await asyncio.to_thread(working, url)
                if busy:  # else the replica has not said yet that it runs something, or does no more
                    victims.append(busy[0])
                    kill_replica(url, busy[0])
                    killed_at = chunks
        return text, chunks, chunks - killed_at if killed_at else 0

    async def run() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
            whole, _, _ = await collect(client, False, "a")
            for salt in "bcdef":  # on a busy machine a stream may be over before anybody knows who sends it
                broken, chunks, after_kill = await collect(client, True, salt)
                assert chunks > 10
                assert broken == whole
                if after_kill:
                    return
                await asyncio.to_thread(wait_for_replicas, url, 2, victims)
            raise AssertionError("no replica was killed in the middle of a stream")

    asyncio.run(run())
    wait_for_replicas(url, 2, victims)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks(url: str, stream: bool) -> None:
    """After a disconnect no sequence runs on and no block stays in use."""

    async def run() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
            request = body("leave me", stream=stream, max_tokens=4000)
            pending = asyncio.create_task(client.post(CHAT, json=request))
            await asyncio.to_thread(eventually, lambda: blocks_in_use(url) > 0)
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)

    def blocks_in_use(url: str) -> int:
        return sum(replica.get("blocks_in_use", 0) for replica in replicas_of(url).values())

    asyncio.run(run())
    eventually(lambda: not working(url) and not blocks_in_use(url))


def test_a_full_queue_answers_429(url: str) -> None:
    """Beyond what replicas and ingress may hold, a request is refused at once with Retry-After; the rest succeed."""

    async def run() -> None:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits) as client:
            requests = [client.post(CHAT, json=body(f"{i} " + "word " * 500, max_tokens=2)) for i in range(200)]
            answers = await asyncio.gather(*requests)
        statuses = [answer.status_code for answer in answers]
        assert set(statuses) == {200, 429}, statuses
        assert statuses.count(200) >= 16
        for answer in answers:
            if answer.status_code == 429:
                assert int(answer.headers["retry-after"]) >= 1
                assert answer.json()["error"]["code"] == "rate_limit_exceeded"

    asyncio.run(run())


def test_every_option_survives_kills_at_random_points(url: str) -> None:
    """Short answers with every option at once, while replicas are killed: each is the undisturbed one to the byte.

    docs/resume.md says what is equal.
    """
    rng = random.Random(7)
    wait_for_replicas(url, 2)
    crashes = ProcessCrashes(url, rng, clients=6)
    questions = Questions(rng, has_logits=False)
    results = asyncio.run(crashes.run(questions, distinct=12, kills=2))
    assert results["answers"] >= 6
    assert results | {"lost": 0, "cut": 0, "altered": 0} == results
    wait_for_replicas(url, 2, crashes.killed)


def test_without_any_replica_clients_are_told_to_come_back(url: str, model: Path) -> None:
    """503 with Retry-After in OpenAI's shape on every route that generates; answers again once replicas are back."""
    completion = {"model": "demo", "prompt": "anyone?", "max_tokens": 2}
    requests = [(CHAT, body("anyone?")), (CHAT, body("anyone?", stream=True)), (COMPLETIONS, completion)]

    async def run() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
            answers = await asyncio.gather(*(client.post(path, json=content) for path, content in requests))
        for answer in answers:
            assert answer.status_code == 503, answer.text
            assert int(answer.headers["retry-after"]) >= 1
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert (error["type"], error["code"]) == ("server_error", "service_unavailable")
            assert "no replica" in error["message"]

    wait_for_replicas(url, 2)
    away = model.rename(model.with_name("away"))
    for replica in replicas_of(url).values():
        os.kill(replica["pid"], signal.SIGKILL)
    eventually(lambda: not replicas_of(url))
    asyncio.run(run())
    away.rename(model)
    wait_for_replicas(url, 2)
    assert httpx.post(url + COMPLETIONS, json=completion, timeout=PATIENCE_S).status_code == 200
