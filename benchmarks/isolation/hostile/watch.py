"""A tenant that minds its own business, and how it is served: every request timed from when it was due.

Knows the streaming client; knows nothing of attacks.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.common.client import RequestFailed, stream_answer
from benchmarks.common.report import percentile

Ask = Callable[[int], dict[str, Any]]
"""From a request's number to the body of its chat completion."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What became of one request. Seconds from when it was due; ``status`` 0: no answer at all."""

    status: int
    ttft_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Watched:
    """Who is watched, and what it asks: after exponential gaps of ``every_s`` on average, the same for each seed."""

    url: str
    api_key: str
    ask: Ask
    every_s: float
    seed: str
    timeout_s: float = 30.0

    async def during(self, seconds: float, first: int = 0) -> list[Seen]:
        """Ask for so long, then wait for what is under way; ``first``: the first request's number."""
        gaps = random.Random(self.seed)  # a workload, not a secret
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=self.timeout_s, limits=limits) as client:
            asked: list[asyncio.Task[Seen]] = []
            due_s = time.monotonic()
            end_s = due_s + seconds
            while due_s < end_s:
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                asked.append(asyncio.create_task(self._send(client, first + len(asked), due_s)))
                due_s += gaps.expovariate(1 / self.every_s)
            return list(await asyncio.gather(*asked))

    async def _send(self, client: httpx.AsyncClient, number: int, due_s: float) -> Seen:
        headers = {"authorization": f"Bearer {self.api_key}"}
        late_s = max(0.0, time.monotonic() - due_s)
        try:
            async with asyncio.timeout(self.timeout_s):
                answer = await stream_answer(client, f"{self.url}/v1/chat/completions", self.ask(number), headers)
        except RequestFailed as error:
            return Seen(error.status)
        except (httpx.HTTPError, TimeoutError):
            return Seen(0)
        return Seen(200, late_s + answer.ttft_s, answer.prompt_tokens, answer.cached_tokens)


def figures(seen: Sequence[Seen]) -> dict[str, Any]:
    """Return the share that was served, p50 and p99 of their TTFT, and their hit rate; None where nothing was."""
    served = [row for row in seen if row.status == 200]
    ttft_s = [row.ttft_s for row in served]
    return {
        "requests": len(seen),
        "statuses": dict(Counter(str(row.status) for row in seen)),
        "served": len(served) / len(seen) if seen else None,
        "ttft_p50_s": percentile(ttft_s, 50) if served else None,
        "ttft_p99_s": percentile(ttft_s, 99) if served else None,
        "hit_rate": sum(row.cached_tokens for row in served) / sum(row.prompt_tokens for row in served)
        if served
        else None,
    }


def beside(alone: Sequence[Seen], under: Sequence[Seen]) -> dict[str, Any]:
    """Return the figures without and with an attack, and their ratios."""
    without, attacked = figures(alone), figures(under)

    def ratio(name: str) -> float | None:
        return attacked[name] / without[name] if attacked[name] is not None and without[name] else None

    return {
        "alone": without,
        "under": attacked,
        "ttft_p99_ratio": ratio("ttft_p99_s"),
        "hit_rate_ratio": ratio("hit_rate"),
    }
