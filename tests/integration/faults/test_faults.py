"""Real SIGKILLs, real disconnects, real overload: nothing is lost and nothing leaks."""

import asyncio
import os
import signal
from pathlib import Path

import httpx
import psutil
import pytest

from serve_app.replay.client import stream_events
from tests.integration.conftest import HTTP, clients, eventually, replicas_of, wait_for_replicas

pytestmark = [pytest.mark.integration, pytest.mark.long]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
UNDISTURBED = "undisturbed"


def body(content: str, **extra: object) -> dict[str, object]:
    messages = [{"role": "user", "content": content}]
    return {"model": "demo", "messages": messages, "max_tokens": 40, "temperature": 1.0, "seed": 5, **extra}


def working(url: str) -> list[str]:
    """Return the ids of the replicas with running or queued work."""
    counts = ("running_sequences", "waiting_sequences", "queued_prefill_tokens")
    return [name for name, replica in replicas_of(url).items() if any(replica[count] for count in counts)]


def kill(url: str, replica_id: str) -> None:
    os.kill(int(replicas_of(url)[replica_id]["pid"]), signal.SIGKILL)


def test_warnings_are_in_the_log_files_when_they_are_raised(url: str) -> None:
    """The ingress warned of its open port when it started, and has logged far fewer lines than Serve would buffer."""
    replica = next(iter(replicas_of(url).values()))
    files = [Path(file.path) for file in psutil.Process(int(replica["pid"])).open_files()]
    logs = next(file.parent for file in files if file.parent.name == "serve" and file.suffix == ".log")
    told = [line for file in logs.glob("*Ingress*.log") for line in file.read_text().splitlines()]
    assert any("WARNING" in line and "no tenants are configured" in line for line in told), told


def test_killed_before_the_first_token(url: str) -> None:
    """The request is sent again elsewhere; the client sees one whole answer, equal to an undisturbed one."""
    victims: list[str] = []

    async def run() -> None:
        async with clients(url) as client:
            request = body("word " * 4000)
            undisturbed = (await client.post(CHAT, json={**request, "cache_salt": UNDISTURBED})).json()
            for salt in "bcdef":  # on a stalled machine the answer may arrive before anybody looks
                await asyncio.to_thread(eventually, lambda: not working(url))
                pending = asyncio.create_task(client.post(CHAT, json={**request, "cache_salt": salt}))

                def is_at_work(pending: asyncio.Task[httpx.Response] = pending) -> bool:
                    victims.extend(working(url)[:1])
                    return bool(victims) or pending.done()

                await asyncio.to_thread(eventually, is_at_work)
                if victims:
                    kill(url, victims[0])
                answer = await pending
                assert answer.status_code == 200, answer.text
                assert answer.json()["choices"] == undisturbed["choices"]
                if victims:
                    return
            raise AssertionError("no replica was seen at work")

    asyncio.run(run())
    wait_for_replicas(url, 2, victims)


def test_killed_in_the_middle_of_streams(url: str) -> None:
    """Each stream continues on another replica with exactly the same tokens, for any options.

    docs: failures
    """
    asked = [
        body("tell me", max_tokens=100),
        body("tell me twice", max_tokens=100, n=2, top_p=0.9, top_k=50),
        body("tell me all", max_tokens=100, temperature=0, ignore_eos=True),
        body("tell me more", max_tokens=100, stop=["\x01"], min_tokens=20, save_system_prompt_kv_cache=True),
    ]
    victims: list[str] = []

    async def collect(client: httpx.AsyncClient, request: dict[str, object], salt: str, chunks: list[int]) -> list[str]:
        """Return the texts of its choices with their finish reasons; count chunks."""
        texts = ["", ""]
        async for event in stream_events(client, CHAT, {**request, "stream": True, "cache_salt": salt}):
            chunks[0] += 1
            for choice in event["choices"]:
                texts[choice["index"]] += (choice["delta"].get("content") or "") + (choice["finish_reason"] or "")
        return texts

    async def run() -> None:
        async with clients(url) as client:
            whole = await asyncio.gather(*(collect(client, request, UNDISTURBED, [0]) for request in asked))
            for salt in "bcdef":  # on a busy machine streams may end before their replica is known
                await asyncio.to_thread(wait_for_replicas, url, 2, victims)
                chunks = [0]
                streams = [asyncio.create_task(collect(client, request, salt, chunks)) for request in asked]

                def under_way(streams: list[asyncio.Task[list[str]]] = streams, chunks: list[int] = chunks) -> bool:
                    return all(task.done() for task in streams) or (chunks[0] >= 40 and bool(working(url)))

                await asyncio.to_thread(eventually, under_way)
                before = chunks[0]
                if busy := working(url):
                    victims.append(busy[0])
                    kill(url, busy[0])
                assert await asyncio.gather(*streams) == whole
                if busy and chunks[0] > before:
                    return
            raise AssertionError("no replica was killed in the middle of a stream")

    asyncio.run(run())
    wait_for_replicas(url, 2, victims)


def test_without_any_replica_clients_are_told_to_come_back(url: str, model: Path) -> None:
    """Every generating route returns 503 with Retry-After in OpenAI's shape, and answers once replicas are back."""
    completion = {"model": "demo", "prompt": "anyone?", "max_tokens": 2}
    requests = [(CHAT, body("anyone?")), (CHAT, body("anyone?", stream=True)), (COMPLETIONS, completion)]
    wait_for_replicas(url, 2)
    away = model.rename(model.with_name("away"))
    for replica in replicas_of(url).values():
        os.kill(replica["pid"], signal.SIGKILL)
    eventually(lambda: not replicas_of(url))
    for path, content in requests:
        answer = HTTP.post(url + path, json=content)
        assert answer.status_code == 503, answer.text
        assert int(answer.headers["retry-after"]) >= 1
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["type"], error["code"]) == ("server_error", "service_unavailable")
        assert "no replica" in error["message"]
    away.rename(model)
    wait_for_replicas(url, 2)
    assert HTTP.post(url + COMPLETIONS, json=completion).status_code == 200
