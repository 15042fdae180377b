"""Tenants that mind their own business, and how they are served: every request timed from when it was due.

Knows the open-loop client; knows nothing of attacks.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.common.open_loop import Result, Shot, fire, hit_rate
from benchmarks.common.report import percentile

Ask = Callable[[int], dict[str, Any]]
"""From a request's number to the body of its chat completion."""
CHAT = "/v1/chat/completions"
TIMEOUT_S = 30.0


def questions(tenant: str, api_key: str, ask: Ask, every_s: float, seconds: float, first: int = 0) -> list[Shot]:
    """Return requests for so long, after exponential gaps of ``every_s`` on average: a tenant's are always the same.

    ``first``: the first request's number.
    """
    gaps = random.Random(tenant)  # a workload, not a secret
    shots: list[Shot] = []
    due_s = 0.0
    while due_s < seconds:
        shots.append(Shot(due_s, CHAT, ask(first + len(shots)), tenant, api_key))
        due_s += gaps.expovariate(1 / every_s)
    return shots


async def watched(url: str, shots: Sequence[Shot]) -> list[Result]:
    """Send them, each at its time, and wait for what is under way."""
    return await fire(url, shots, TIMEOUT_S, lambda: None)


def figures(results: Sequence[Result]) -> dict[str, Any]:
    """Return the share that was served, p50 and p99 of their TTFT, and their hit rate; None where nothing was."""
    answers = [result.answer for result in results if result.answer is not None]
    ttft_s = [result.ttft_s for result in results if result.answer is not None]
    return {
        "requests": len(results),
        "statuses": dict(Counter(str(result.status) for result in results)),
        "served": len(answers) / len(results) if results else None,
        "ttft_p50_s": percentile(ttft_s, 50) if answers else None,
        "ttft_p99_s": percentile(ttft_s, 99) if answers else None,
        "hit_rate": hit_rate(answers) if answers else None,
    }


def beside(alone: Sequence[Result], under: Sequence[Result]) -> dict[str, Any]:
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
