"""Conversations outlive the processes that store them: real ingresses, and a whole instance, killed at work."""

import asyncio
import json
import os
import random
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import httpx
import psutil
import pytest

from benchmarks.common.server import MARK, instance, marked_processes
from tests.integration.conftest import HTTP, alone, clients, eventually, workers_of

pytestmark = [pytest.mark.integration, pytest.mark.long]

RESPONSES = "/v1/responses"
INGRESSES = 2
CLIENTS = 4
KILLS = 5
ENDED = '"type":"response.incomplete"'
SIMULATED = "--model demo --engine simulated --replicas 1 --set simulated_decode_step_s=0.01"


@contextmanager
def running(file: Path, mark: str) -> Iterator[str]:
    """An instance with a mark in its processes' environment, and with its file of responses."""
    settings = f"--set=ingress_replicas={INGRESSES}", f"--set=responses_file={file}"
    env = {"WARMPATH_SECRET": "a secret of the test's own", MARK: mark}
    with alone(instance(*SIMULATED.split(), *settings, env=env)) as url:
        yield url


async def talk(url: str, acknowledged: list[str], over: asyncio.Event) -> int:
    """Have one conversation, streamed and not; note each completed response; return the number of streamed ones."""
    streams = 0
    while not over.is_set():
        last = acknowledged[-1] if acknowledged else None
        body = {"model": "demo", "input": "On?", "max_output_tokens": 4, "previous_response_id": last}
        try:
            async with clients(url) as client:  # a new connection each time, to any ingress
                whole = await client.post(RESPONSES, json=body)
                if whole.status_code == 200:
                    acknowledged.append(whole.json()["id"])
                    body["previous_response_id"] = acknowledged[-1]
                assert whole.status_code in (200, 502, 503), (whole.text, whole.headers)
                streamed = await client.post(RESPONSES, json={**body, "stream": True})
                ends = [line for line in streamed.text.splitlines() if line.startswith("data: ") and ENDED in line]
                acknowledged += [json.loads(end.removeprefix("data: "))["response"]["id"] for end in ends]
                streams += len(ends)
        except httpx.HTTPError:
            await asyncio.sleep(0.1)  # the ingress is gone
    return streams


def serving_ingresses(url: str) -> int:
    """Return the number of ingresses that serve, from the metrics of all. After killed starts Serve waits longer."""
    return len(set(re.findall(r'ingress="([^"]+)"', HTTP.get(f"{url}/metrics").raise_for_status().text)))


def lost(url: str, conversations: list[list[str]]) -> list[str]:
    """Return the acknowledged responses that are missing."""
    return [one for each in conversations for one in each if HTTP.get(f"{url}{RESPONSES}/{one}").status_code != 200]


def test_killed_ingresses_and_a_killed_head_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    """Ingresses die one by one under writing clients, then the whole instance; the next one continues from all of it.

    docs: failures, cluster
    """
    file, mark = tmp_path / "responses.sqlite", uuid4().hex
    conversations: list[list[str]] = [[] for _ in range(CLIENTS)]

    async def kill_ingresses(url: str) -> None:
        over = asyncio.Event()
        talks = [asyncio.create_task(talk(url, each, over)) for each in conversations]
        try:
            for _ in range(KILLS):
                before = sum(map(len, conversations))
                await asyncio.to_thread(eventually, lambda before=before: sum(map(len, conversations)) > before + 3)
                await asyncio.to_thread(eventually, lambda: serving_ingresses(url) == INGRESSES)
                os.kill(random.choice(workers_of(url, "Ingress")), signal.SIGKILL)
        finally:
            over.set()
            assert sum(await asyncio.gather(*talks)) > 0

    with running(file, mark) as url:
        asyncio.run(kill_ingresses(url))
        assert min(map(len, conversations)) > 0
        assert lost(url, conversations) == []
        family = [process for process, _ in marked_processes(mark)]
        assert len(family) > INGRESSES
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family)
    with running(file, uuid4().hex) as url:
        assert lost(url, conversations) == []
        for each in conversations:
            body = {"model": "demo", "input": "And now?", "max_output_tokens": 4, "previous_response_id": each[-1]}
            answer = HTTP.post(url + RESPONSES, json=body).raise_for_status().json()
            items = HTTP.get(f"{url}{RESPONSES}/{answer['id']}/input_items?limit=100").json()["data"]
            assert items[0]["content"][0]["text"] == "And now?"
            assert len(items) == 100 or len(items) % 2 == 1
