"""Nothing outlives its client: after any storm no sequence runs and no block is in use, in both modes of Ray Serve.

An answer that nobody cancelled would run for ten minutes, far longer than any test waits.
"""

import asyncio
import os
import signal
from collections import Counter
from contextlib import suppress
from random import Random

import httpx
import pytest

from tests.integration.conftest import cache_state, clients, eventually, metric, replicas_of, workers_of

pytestmark = [pytest.mark.integration, pytest.mark.long]

MAX_TOKENS = 30_000
CLIENTS, BURST = 400, 100
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(params=["throughput_optimized", "default"])
def storm_url(request: pytest.FixtureRequest) -> str:
    """The folder's instances: one in the mode of `warmpath serve`, and one in the other mode."""
    if request.param == "throughput_optimized":
        return str(request.getfixturevalue("url"))
    return str(request.getfixturevalue("second").url)


def in_use(url: str) -> int:
    """Return the sum of running and waiting sequences, blocks in use and open reservations, as replicas report them."""
    state = cache_state(url)
    assert len(state["replicas"]) == 2
    names = ("running_sequences", "waiting_sequences", "blocks_in_use")
    return int(state["open_reservations"]) + sum(int(replica[name]) for replica in state["replicas"] for name in names)


def wait_until_nothing_is_in_use(url: str) -> None:
    """Wait for several idle reports in a row, so that the last one is newer than the last client."""
    idle = 0

    def stays_idle() -> bool:
        nonlocal idle
        idle = idle + 1 if in_use(url) == 0 else 0
        return idle >= 20

    eventually(stays_idle)


def body_of(rng: Random, number: int) -> tuple[str, dict[str, object]]:
    """A request that would take ten minutes: streamed or whole, with one answer, several, or several prompts."""
    stream = rng.random() < 0.7
    common: dict[str, object] = {"model": "demo", "max_tokens": MAX_TOKENS, "ignore_eos": True, "stream": stream}
    text = f"{number} " + "word " * rng.choice([5, 50, 500])
    kind = rng.random()
    if kind < 0.7:
        return CHAT, {**common, "messages": [{"role": "user", "content": text}]}
    if kind < 0.85:
        return CHAT, {**common, "messages": [{"role": "user", "content": text}], "n": 16}
    # More prompts than fit, or fewer.
    return COMPLETIONS, {**common, "prompt": [f"{part} {text}" for part in range(rng.choice([8, 128]))]}


def test_after_a_storm_nothing_runs_on(storm_url: str) -> None:
    """Hundreds of clients in bursts leave at random moments: in the queue, before the first token, in mid-stream.

    Some exceed the capacity, and are refused in part.

    docs: routing
    """
    rng = Random(7)
    ended: Counter[str] = Counter()

    async def visit(client: httpx.AsyncClient, number: int) -> None:
        path, content = body_of(rng, number)
        patience_s, chunks = rng.choice([0.03, 0.1, 0.3, 1.0, 4.0]) * rng.random(), rng.choice([1, 3, 10**9])
        try:
            async with asyncio.timeout(patience_s), client.stream("POST", path, json=content) as response:
                if response.status_code != 200:
                    ended[str(response.status_code)] += 1
                    return
                async for _ in response.aiter_bytes():
                    chunks -= 1
                    if chunks <= 0:
                        break
                ended["in mid-stream"] += 1
        except TimeoutError:
            ended["before its end"] += 1

    async def storm() -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with clients(storm_url, limits=limits) as client:
            for first in range(0, CLIENTS, BURST):
                await asyncio.gather(*(visit(client, number) for number in range(first, first + BURST)))

    asyncio.run(storm())
    assert set(ended) <= {"in mid-stream", "before its end", "429"}, ended
    wait_until_nothing_is_in_use(storm_url)
    assert metric(storm_url, "warmpath_router_faults_total") == 0


def test_the_requests_of_a_dead_ingress_end_with_it(storm_url: str) -> None:
    """SIGKILL of the ingress in the middle of streams: the sequences end, and a new ingress finds idle replicas."""

    async def run() -> None:
        async with clients(storm_url) as client:

            async def listen(number: int) -> None:
                messages = [{"role": "user", "content": f"{number}"}]
                content = {"model": "demo", "messages": messages, "max_tokens": MAX_TOKENS, "ignore_eos": True}
                with suppress(httpx.HTTPError):
                    async with client.stream("POST", CHAT, json={**content, "stream": True}) as response:
                        async for _ in response.aiter_bytes():
                            pass

            listeners = [asyncio.create_task(listen(number)) for number in range(8)]
            await asyncio.to_thread(eventually, lambda: in_use(storm_url) > 16)
            (pid,) = workers_of(storm_url, "Ingress")
            os.kill(pid, signal.SIGKILL)
            await asyncio.gather(*listeners)

    asyncio.run(run())
    eventually(lambda: len(replicas_of(storm_url)) == 2)  # a new ingress knows them
    wait_until_nothing_is_in_use(storm_url)
