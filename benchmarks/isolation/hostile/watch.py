"""A tenant that minds its own business, and how it is served: every request timed from when it was due.

Knows the streaming client; knows nothing of attacks.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.common.client import RequestFailed, stream_answer

Ask = Callable[[int], dict[str, Any]]
"""From a request's number to the body of its chat completion."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What became of one request. Seconds from when it was due; ``status`` 0: no answer at all."""

    wait_s: float
    status: int
    ttft_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    ended_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Watched:
    """Who is watched, and what it asks, every so many seconds.

    ``in_turn``: a request waits for the one before it, else none does. ``fresh``: each on a connection of its own.
    ``gaps``: what draws exponential gaps of ``every_s`` on average; without it they are all alike.
    """

    url: str
    api_key: str
    ask: Ask
    every_s: float
    in_turn: bool = False
    fresh: bool = False
    timeout_s: float = 30.0
    gaps: random.Random | None = None

    async def until(self, enough: asyncio.Event, first: int = 0) -> list[Seen]:
        """Ask until ``enough`` is set, then wait for what is under way; ``first``: the first request's number."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0 if self.fresh else None)
        async with httpx.AsyncClient(timeout=self.timeout_s, limits=limits) as client:
            asked: list[asyncio.Task[Seen]] = []
            due_s = time.monotonic()
            while not enough.is_set():
                asked.append(asyncio.create_task(self._one(client, first + len(asked), due_s)))
                if self.in_turn:
                    await asyncio.wait({asked[-1]})
                    due_s = time.monotonic()
                due_s += self.every_s if self.gaps is None else self.gaps.expovariate(1 / self.every_s)
                try:
                    async with asyncio.timeout(max(0.0, due_s - time.monotonic())):
                        await enough.wait()
                except TimeoutError:
                    continue
            return list(await asyncio.gather(*asked))

    async def during(self, seconds: float, first: int = 0) -> list[Seen]:
        """Ask for so long, then wait for what is under way."""
        enough = asyncio.Event()
        asyncio.get_running_loop().call_later(seconds, enough.set)
        return await self.until(enough, first)

    async def _one(self, client: httpx.AsyncClient, number: int, due_s: float) -> Seen:
        headers = {"authorization": f"Bearer {self.api_key}"}
        late_s = max(0.0, time.monotonic() - due_s)
        try:
            async with asyncio.timeout(self.timeout_s):
                answer = await stream_answer(client, f"{self.url}/v1/chat/completions", self.ask(number), headers)
        except RequestFailed as error:
            return Seen((ended_s := time.monotonic()) - due_s, error.status, ended_s=ended_s)
        except (httpx.HTTPError, TimeoutError):
            return Seen((ended_s := time.monotonic()) - due_s, 0, ended_s=ended_s)
        return Seen(
            (ended_s := time.monotonic()) - due_s,
            200,
            late_s + answer.ttft_s,
            answer.prompt_tokens,
            answer.cached_tokens,
            answer.completion_tokens,
            ended_s,
        )
