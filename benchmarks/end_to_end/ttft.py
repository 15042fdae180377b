"""End to end over HTTP: the time to the first token with and without the system prompt's KV in the cache.

Each of several long system prompts is sent once cold and then several times warm, with a new question each time. A
second instance in float32 compares cached and uncached greedy answers.
"""

import asyncio
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common.harness import Findings, FlagError, Options, benchmark, engine_flag, flag, progress
from benchmarks.common.prompts import text_of
from benchmarks.common.report import spread
from benchmarks.common.server import instance
from serve_app.checkpoints.sources import resolve_model
from serve_app.replay.client import TimedAnswer, chat_body, stream_chat


@benchmark(
    __doc__,
    engine_flag("torch", "prefixes", simulated=False),
    flag("replicas", 2),
    flag("prefix-tokens", 8000),
    flag("question-tokens", 32),
    flag("prompts", 5, "system prompts; each is sent once cold"),
    flag("warm", 6, "warm requests per system prompt, at least 5"),
    flag("max-tokens", 16),
    model="small",
)
def run(options: Options) -> Findings:
    """Measure times to first token, then compare answers in float32."""
    if options.warm < 5:
        raise FlagError("--warm must be at least 5: fewer say nothing about a warm TTFT")
    model_path = resolve_model(options.model)
    flags = ["--model", options.model, "--engine", options.engine, "--replicas", str(options.replicas)]
    with instance(*flags) as url:
        timing = asyncio.run(measure(url, model_path, options))
    with instance(*flags, "--set", "dtype=float32") as url:
        equal = asyncio.run(outputs_equal(url, model_path, options))
    return Findings(
        {**timing, "outputs_equal": equal},
        f"The first token arrived after {timing['warm_ms_p50']:.0f} ms with the prefix cached and after "
        f"{timing['cold_ms_p50']:.0f} ms without (medians): {timing['reduction']:.1%} sooner. "
        f"In float32 cached and uncached answers were {'equal' if equal else 'NOT equal'}.",
    )


def body_of(model_path: Path, options: Options, prompt: int, question: int) -> dict[str, Any]:
    """Return the chat request with a system prompt and a question of these numbers."""
    system = text_of(options.prefix_tokens, model_path, prompt)
    user = text_of(options.question_tokens, model_path, 10_000 + question)
    return chat_body(options.model, options.max_tokens, user, system)


async def measure(url: str, model_path: Path, options: Options) -> dict[str, Any]:
    """Return the times in ms of every prompt, first cold, then warm."""
    cold: list[TimedAnswer] = []
    warm: list[TimedAnswer] = []
    async with httpx.AsyncClient(timeout=300) as client:
        # Warm up the connection and the tokenizer.
        await stream_chat(client, url, {**body_of(model_path, options, 99, 0), "max_tokens": 1})
        for prompt in progress(range(options.prompts), "ttft"):
            cold.append(await stream_chat(client, url, body_of(model_path, options, prompt, 100 * prompt)))
            for question in range(1, options.warm + 1):
                body = body_of(model_path, options, prompt, 100 * prompt + question)
                warm.append(await stream_chat(client, url, body))
    cold_ms = spread([1000 * answer.ttft_s for answer in cold])
    warm_ms = spread([1000 * answer.ttft_s for answer in warm])
    return {
        "cold_ms_p50": cold_ms["p50"],
        "warm_ms_p50": warm_ms["p50"],
        "reduction": 1 - warm_ms["p50"] / cold_ms["p50"],
        "prefix_tokens": options.prefix_tokens,
        "prompt_tokens": warm[0].prompt_tokens,
        "cold_cached_tokens_max": max(answer.cached_tokens for answer in cold),
        "warm_cached_tokens_min": min(answer.cached_tokens for answer in warm),
        "cold_samples": len(cold),
        "warm_samples": len(warm),
        "cold_ms": cold_ms,
        "warm_ms": warm_ms,
        "tpot_ms_p50": spread([1000 * answer.tpot_s for answer in warm])["p50"],
    }


async def outputs_equal(url: str, model_path: Path, options: Options) -> bool:
    """Return whether cold and warm greedy answers are equal."""
    async with httpx.AsyncClient(timeout=300) as client:
        for prompt in progress(range(3), "outputs"):
            body = body_of(model_path, options, prompt, prompt)
            uncached = await stream_chat(client, url, {**body, "cache_salt": "cold"})
            await stream_chat(client, url, {**body_of(model_path, options, prompt, 77), "max_tokens": 1})
            cached = await stream_chat(client, url, body)
            if uncached.cached_tokens != 0 or cached.cached_tokens < options.prefix_tokens - 64:
                raise RuntimeError(f"the answers were not uncached and cached as planned: {uncached=} {cached=}")
            if uncached.text != cached.text:
                return False
    return True
