"""Clients of the measured systems; many streams are read in processes of their own, so that this is not measured."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context
from time import perf_counter
from typing import Any, NamedTuple, Self

import httpx

from benchmarks.gpu.systems import Target
from serve_app.replay.client import TimedAnswer, stream_answer, stream_events

CHAT = "/v1/chat/completions"
TIMEOUT_S = 300.0
RequestBody = Mapping[str, Any]


class StreamedAnswer(NamedTuple):
    """A streamed answer; ``pause_s``: the longest time between two of its pieces."""

    text: str
    tokens: int
    pause_s: float


def new_client() -> httpx.AsyncClient:
    """Return a client for any number of connections. Without TLS it needs no certificates, which take time to load."""
    return httpx.AsyncClient(timeout=TIMEOUT_S, limits=httpx.Limits(max_connections=None), verify=False)  # noqa: S501


async def ask(client: httpx.AsyncClient, target: Target, body: RequestBody) -> TimedAnswer:
    """Send a chat. Raises RequestFailed or httpx.HTTPError."""
    return await stream_answer(client, target.url + CHAT, dict(body), dict(target.headers))


def answers(target: Target, bodies: Sequence[RequestBody]) -> list[TimedAnswer]:
    """Send chats together from this process. Raises like ``ask``."""

    async def together() -> list[TimedAnswer]:
        async with new_client() as client:
            return await asyncio.gather(*(ask(client, target, body) for body in bodies))

    return asyncio.run(together())


async def timed_stream(client: httpx.AsyncClient, target: Target, body: RequestBody) -> StreamedAnswer:
    """Send a chat, and time its pieces. Raises like ``ask``."""
    times, parts, tokens = [], [], 0
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async for event in stream_events(client, target.url + CHAT, streamed, dict(target.headers)):
        for choice in event.get("choices") or ():
            if content := choice.get("delta", {}).get("content"):
                times.append(perf_counter())
                parts.append(content)
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    return StreamedAnswer(
        "".join(parts), tokens, max((after - before for before, after in pairwise(times)), default=0.0)
    )


class Clients:
    """Half as many processes as the machine has cores, at most eight."""

    def __enter__(self) -> Self:
        self._count = max(1, min(8, (os.cpu_count() or 1) // 2))
        self._pool = ProcessPoolExecutor(self._count, get_context("spawn"))
        list(self._pool.map(abs, range(self._count)))
        return self

    def __exit__(self, *_: object) -> None:
        for process in list(self._pool._processes.values()):  # a running request would be waited for
            process.kill()
        self._pool.shutdown(cancel_futures=True)

    def answers(self, target: Target, bodies: Sequence[RequestBody]) -> list[TimedAnswer]:
        """Send chats together, from all processes. Raises like ``ask``."""
        parts = [list(bodies[number :: self._count]) for number in range(min(self._count, len(bodies)))]
        return [answer for part in self._pool.map(answers, [target] * len(parts), parts) for answer in part]
