"""`warmpath bench`: measure a running server's speed, its cache's benefit, and its behaviour beside a flood."""

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import quantiles
from typing import Any
from uuid import uuid4

import httpx
from rich.progress import track
from rich.table import Table

from serve_app.cli.console import console, fail
from serve_app.replay.client import RequestFailed, TimedAnswer, chat_body, stream_chat
from serve_app.request_files import numbered_lines

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


async def answers(server: Server, bodies: Sequence[Body], at_once: int, label: str) -> list[TimedAnswer]:
    """Send requests, ``at_once`` of them concurrently. Exits with an error if one fails."""
    gate = asyncio.Semaphore(at_once)
    async with server.client() as client:

        async def one(body: Body) -> TimedAnswer:
            async with gate:
                return await stream_chat(client, server.url, body)

        tasks = [asyncio.create_task(one(body)) for body in bodies]
        try:
            return [await task for task in track(tasks, label, console=console, transient=True)]
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


def row(name: str, timed: Sequence[TimedAnswer]) -> list[str]:
    """Return a table's row: TTFT (p50, p90), an answer's tokens per second, the cached part of the prompts."""
    first, late = percentiles(answer.ttft_s for answer in timed)
    decode = [1 / answer.tpot_s for answer in timed if answer.completion_tokens > 1 and answer.tpot_s > 0]
    prompts = sum(answer.prompt_tokens for answer in timed)
    cached = f"{sum(answer.cached_tokens for answer in timed) / prompts:.0%}" if prompts else "unknown"
    speed = f"{percentiles(decode)[0]:.1f}" if decode else "-"
    return [name, str(len(timed)), f"{first * 1000:.0f} ms", f"{late * 1000:.0f} ms", speed, cached]


def measure_speed(server: Server, model: str | None, requests: int, at_once: int, words: int, max_tokens: int) -> None:
    """Measure the server's speed: new prompts, then the same ones again."""
    name = model or server.model()
    bodies = [chat_body(name, max_tokens, "Sum this up.", text) for text in texts(requests, words, 0)]
    _show(asyncio.run(_in_turn(server, at_once, {"new prompts": bodies, "the same again": bodies})))


def measure_cache(file: Path, server: Server, model: str | None, at_once: int) -> None:
    """Measure the cache's benefit for your prompts: each one alone, then all of them in the order of the file."""
    name = model or server.model()
    try:
        bodies = [_chat(file, number, line, name) for number, line in numbered_lines(file)]
    except ValueError as error:
        fail(str(error))
    if not bodies:
        fail(f"{file} holds no requests")
    apart = [body | {"cache_salt": uuid4().hex} for body in bodies]
    shared = uuid4().hex
    together = [body | {"cache_salt": shared} for body in bodies]
    _show(asyncio.run(_in_turn(server, at_once, {"without the cache": apart, "with the cache": together})))


def measure_neighbour(
    server: Server, flooded: Server, model: str | None, requests: int, flood_at_once: int, words: int, max_tokens: int
) -> None:
    """Measure a tenant's requests beside another tenant that floods the server."""
    if server.api_key == flooded.api_key:
        fail("a neighbour is another tenant: give its key with --flood-api-key, and yours with --api-key")
    name = model or server.model()
    [system] = texts(1, words, 0)
    bodies = [chat_body(name, max_tokens, f"Question {number}.", system) for number in range(requests)]

    def new() -> Body:
        return chat_body(name, 1, "Sum this up.", *texts(1, words, 1))

    async def flood(client: httpx.AsyncClient, begun: asyncio.Event) -> None:
        while True:
            with suppress(RequestFailed, httpx.HTTPError):  # the server may refuse a flood
                await stream_chat(client, flooded.url, new())
            begun.set()

    async def both() -> list[tuple[str, list[TimedAnswer]]]:
        for each, body in ((server, bodies[0]), (flooded, new())):
            await answers(each, [body], 1, "warm-up")
        rows, begun = await _in_turn(server, 1, {"alone": bodies}), asyncio.Event()
        async with flooded.client() as client:
            flooding = [asyncio.create_task(flood(client, begun)) for _ in range(flood_at_once)]
            try:
                await begun.wait()
                return rows + await _in_turn(server, 1, {"beside a flood": bodies})
            finally:
                for task in flooding:
                    task.cancel()

    _show(asyncio.run(both()))


async def _in_turn(server: Server, at_once: int, sets: Mapping[str, list[Body]]) -> list[tuple[str, list[TimedAnswer]]]:
    return [(label, await answers(server, bodies, at_once, label)) for label, bodies in sets.items()]


def _chat(file: Path, number: int, line: bytes, model: str) -> Body:
    try:
        request = json.loads(line)
        body = request.get("body", request) if isinstance(request, dict) else None
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        expected = 'each line is a chat request, {"messages": [...]}, or has one as its "body"'
        raise ValueError(f"{file}, line {number}: {expected}")
    return body | {"model": model, "temperature": 0, "max_tokens": body.get("max_tokens") or 32}


def _show(rows: list[tuple[str, list[TimedAnswer]]]) -> None:
    table = Table("", "requests", "TTFT p50", "TTFT p90", "tokens/s of an answer", "prompt from the cache")
    for name, timed in rows:
        table.add_row(*row(name, timed))
    console.print(table)
