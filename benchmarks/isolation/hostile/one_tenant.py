"""What fairness costs where nobody needs it: one tenant's warm TTFT and throughput, beside another checkout's.

There is no setting that switches fairness off. Without a checkout to compare with, figures are told without a bar.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import ExitStack
from typing import Any

import httpx

from benchmarks.common.client import chat_body, stream_answer
from benchmarks.common.paired import alternate, ratios
from benchmarks.common.prompts import WORDS
from benchmarks.common.report import spread
from benchmarks.common.server import Checkout
from benchmarks.isolation.hostile.raw_http import CHAT
from benchmarks.isolation.hostile.stage import WATCHED, Stage, stage
from benchmarks.isolation.hostile.verdicts import at_least, at_most, verdict

WARM_TTFT, THROUGHPUT = 1.01, 0.99
_SYSTEM = " ".join(WORDS * 20)
_WARM_REQUESTS = 100
_STREAMS, _STREAM_TOKENS, _ROUNDS = 32, 32, 4


def one_tenant(engine: str, checkout: Checkout | None, baseline: Checkout | None, pairs: int) -> dict[str, Any]:
    """Measure an instance with one tenant, and one of ``baseline`` beside it where it is given, in turns."""
    with ExitStack() as stack:
        here = stack.enter_context(stage(engine, checkout, [WATCHED]))
        if baseline is None:
            return asyncio.run(_absolute(here, pairs))
        return asyncio.run(_compared(here, stack.enter_context(stage(engine, baseline, [WATCHED])), pairs))


async def _absolute(here: Stage, pairs: int) -> dict[str, Any]:
    side = _Side(here)
    await side.warm_ttft_s(-1)
    figures = {
        "warm_ttft_s": spread([await side.warm_ttft_s(number) for number in range(pairs)]),
        "tokens_per_s": spread([await side.tokens_per_s(number) for number in range(pairs)]),
    }
    return verdict(figures, [])


async def _compared(here: Stage, there: Stage, pairs: int) -> dict[str, Any]:
    mine, theirs = _Side(here), _Side(there)
    for side in (mine, theirs):
        await side.warm_ttft_s(-1)
        await side.tokens_per_s(-1)
    ttft = ratios(*await alternate(pairs, mine.warm_ttft_s, theirs.warm_ttft_s))
    tokens = ratios(*await alternate(pairs, mine.tokens_per_s, theirs.tokens_per_s))
    bars = [
        at_most(f"warm TTFT <= {WARM_TTFT}x of the baseline's", ttft["ratio"], WARM_TTFT),
        at_least(f"throughput >= {THROUGHPUT}x of the baseline's", tokens["ratio"], THROUGHPUT),
    ]
    return verdict({"warm_ttft_s": ttft, "tokens_per_s": tokens}, bars)


class _Side:
    """One instance's figures; every call asks what was not asked before, after one system prompt."""

    def __init__(self, stage: Stage) -> None:
        self._url = stage.url + CHAT
        self._headers = {"authorization": f"Bearer {stage.keys[WATCHED]}"}
        self._numbers = itertools.count()

    async def warm_ttft_s(self, _: int) -> float:
        """Return the median TTFT of requests one after the other."""
        async with httpx.AsyncClient(timeout=60) as client:
            answers = [
                await stream_answer(client, self._url, self._body(1), self._headers) for _ in range(_WARM_REQUESTS)
            ]
        return spread([answer.ttft_s for answer in answers])["p50"]

    async def tokens_per_s(self, _: int) -> float:
        """Return the generated tokens a second of many streams at once."""
        started_s = time.perf_counter()

        async def one(client: httpx.AsyncClient) -> int:
            return sum(
                [
                    (
                        await stream_answer(client, self._url, self._body(_STREAM_TOKENS), self._headers)
                    ).completion_tokens
                    for _ in range(_ROUNDS)
                ]
            )

        async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None)) as client:
            tokens = sum(await asyncio.gather(*(one(client) for _ in range(_STREAMS))))
        return tokens / (time.perf_counter() - started_s)

    def _body(self, max_tokens: int) -> dict[str, Any]:
        body = chat_body("demo", max_tokens, f"question {next(self._numbers)}", _SYSTEM)
        return {**body, "ignore_eos": True}
