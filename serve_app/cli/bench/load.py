"""Concurrent requests to a running server, and the figures of their answers."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from statistics import quantiles
from typing import Any
from uuid import uuid4

import httpx
from rich.progress import track

from serve_app.cli.bench.client import RequestFailed, TimedAnswer, stream_chat
from serve_app.cli.console import console, fail

Body = dict[str, Any]
TIMEOUT_S = 600.0
WORDS = "river stone copper garden winter signal harbor window letter orange silver market bridge forest".split()


@dataclass(frozen=True, slots=True)
class Server:
    """An OpenAI-compatible server. ``url``: without /v1; ``api_key``: a tenant's key, or ""."""

    url: str
    api_key: str = ""

    def client(self) -> httpx.AsyncClient:
        """Return a client with the key."""
        headers = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return httpx.AsyncClient(timeout=TIMEOUT_S, headers=headers, limits=httpx.Limits(max_connections=None))

    def model(self) -> str:
        """Return the first model that the server lists; exit with an error if it lists none."""
        headers = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        try:
            answer = httpx.get(f"{self.url}/v1/models", headers=headers, timeout=10)
            models = answer.raise_for_status().json()["data"]
            return str(models[0]["id"])
        except (httpx.HTTPError, ValueError, LookupError) as error:
            fail(
                f"{self.url} does not list its models ({error}); name a running server with --url, a key with --api-key"
            )


def texts(count: int, words: int, seed: int) -> list[str]:
    """Return ``count`` different texts of ``words`` words each."""
    draw = Random(seed)  # noqa: S311
    return [f"{uuid4().hex} " + " ".join(draw.choices(WORDS, k=words)) for _ in range(count)]


async def answers(server: Server, bodies: Sequence[Body], at_once: int, told: str) -> list[TimedAnswer]:
    """Send requests, ``at_once`` of them concurrently. Exits with an error if one fails."""
    gate = asyncio.Semaphore(at_once)
    async with server.client() as client:

        async def one(body: Body) -> TimedAnswer:
            async with gate:
                return await stream_chat(client, server.url, body)

        tasks = [asyncio.create_task(one(body)) for body in bodies]
        try:
            return [await task for task in track(tasks, told, console=console, transient=True)]
        except (RequestFailed, httpx.HTTPError) as error:
            fail(f"a request failed: {error or type(error).__name__}")
        finally:
            for task in tasks:
                task.cancel()


def percentiles(values: Iterable[float]) -> tuple[float, float]:
    """Return the median and the 90th percentile."""
    ordered = sorted(values)
    if len(ordered) == 1:
        return ordered[0], ordered[0]
    cuts = quantiles(ordered, n=10, method="inclusive")
    return cuts[4], cuts[8]


def row(name: str, found: Sequence[TimedAnswer]) -> list[str]:
    """Return a table's row: TTFT (p50, p90), an answer's tokens per second, the cached part of the prompts."""
    first, late = percentiles(answer.ttft_s for answer in found)
    decode = [1 / answer.tpot_s for answer in found if answer.completion_tokens > 1 and answer.tpot_s > 0]
    prompts = sum(answer.prompt_tokens for answer in found)
    cached = f"{sum(answer.cached_tokens for answer in found) / prompts:.0%}" if prompts else "unknown"
    speed = f"{percentiles(decode)[0]:.1f}" if decode else "-"
    return [name, str(len(found)), f"{first * 1000:.0f} ms", f"{late * 1000:.0f} ms", speed, cached]
