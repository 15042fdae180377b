"""Requests of a run, and what their answers must be: one seed makes both, whatever happens to the cluster.

Conversations and prompts are those of many tenants; times follow the scenarios' load. The answers come from one engine
behind a plain server, to which nothing ever happens. Knows no cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import httpx

from benchmarks.common.client import Answer, stream_answer
from benchmarks.common.open_loop import Shot
from benchmarks.end_to_end.autoscale.scenarios import Span, arrivals
from benchmarks.end_to_end.replay.text import TraceText
from benchmarks.peers.workers import workers
from benchmarks.traffic.tenants import TrafficSettings, tenant_traffic
from serve_app.checkpoints.sources.resolve import resolve_model

PATH = "/v1/completions"
_CLIENTS = 8
_POOLS = 16
"""How many replicas' pools the undisturbed engine has."""
_START_S = 36_000.0
_REQUESTS_PER_S = 0.4
"""Of the tenants' own time: a conversation goes on after some 50 requests, and so within the minutes of a run."""
_TENANTS, _SYSTEM_PROMPTS = 4, 6
"""Few, so that caches are warm after a minute."""


@dataclass(frozen=True, slots=True)
class TrafficShape:
    """``tokens_per_id``: of a trace's 512; ``output_shrink``: what answers' tokens are divided by.

    ``long_tokens``: what every fourth answer has instead, where that is over 0.
    """

    tokens_per_id: int
    output_shrink: int
    max_blocks: int
    long_tokens: int = 0


def shots_of(spans: Sequence[Span], peak_per_s: float, model: str, shape: TrafficShape, seed: int) -> list[Shot]:
    """Return what is sent when, drawn from ``seed``."""
    times = list(arrivals(spans, peak_per_s, Random(seed)))
    text = TraceText(resolve_model(model), shape.tokens_per_id)
    wanted = TrafficSettings(
        _REQUESTS_PER_S,
        2.0 * len(times) / _REQUESTS_PER_S,
        _START_S,
        _TENANTS,
        _SYSTEM_PROMPTS,
        max_blocks=shape.max_blocks,
        seed=seed,
    )
    shots = []
    for number, (at_s, request) in enumerate(zip(times, tenant_traffic(wanted), strict=False)):
        tokens = max(4, min(round(request.output_tokens / shape.output_shrink), 1024 // shape.output_shrink))
        body = {
            "model": model,
            "prompt": text.prompt(request),
            "max_tokens": shape.long_tokens if shape.long_tokens and number % 4 == 0 else tokens,
            "temperature": 0,
            "seed": number,
        }
        shots.append(Shot(at_s, PATH, body, request.tenant))
    return shots


def undisturbed(shots: Sequence[Shot], settings: dict[str, Any], progress: Callable[[], None]) -> list[Answer]:
    """Return every answer of one engine without Ray, asked by a few clients at a time, with a cache as if unlimited.

    ``settings``: of an engine that is one of several; a simulated one's rates do not change its tokens, so they are
    raised.
    """
    settings = {**settings, "num_blocks": settings["num_blocks"] * _POOLS}
    if settings["engine"] == "simulated":
        settings = {**settings, "simulated_prefill_tokens_per_s": 1e6, "simulated_decode_step_s": 0.001}
    with workers(1, settings) as [url]:
        return asyncio.run(_ask_all(url, shots, progress))


async def _ask_all(url: str, shots: Sequence[Shot], progress: Callable[[], None]) -> list[Answer]:
    answers: dict[int, Answer] = {}
    turns = iter(enumerate(shots))

    async def work(client: httpx.AsyncClient) -> None:
        for number, shot in turns:
            answers[number] = await stream_answer(client, url + shot.path, shot.body)
            progress()

    async with httpx.AsyncClient(timeout=300) as client:
        await asyncio.gather(*(work(client) for _ in range(_CLIENTS)))
    return [answers[number] for number in range(len(shots))]
