"""How true the estimated time to first token is, over HTTP: actual / estimated of short, long and cached prompts.

Before each request the instance explains what it expects; then the request is sent and its first token timed here, so
that actual holds HTTP and the tokenizer. Each kind alone, then all in turns; one request at a time. `router` is the
instance's own comparison, from its routing decision to the first token. `python -m benchmarks estimates --json FILE`
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from typing import Any

import httpx

from benchmarks.common.client import chat_body, stream_chat
from benchmarks.common.prompts import text_of
from benchmarks.common.report import parser_of, progress, spread, write
from benchmarks.common.server import instance
from serve_app.checkpoints.sources.resolve import resolve_model

KINDS = ("short", "long", "cached")
"""Cold and short; cold and long; long, with a system prompt that was asked before and a short question."""

LEARNING = 18
"""Requests before those that count: kernels are compiled, the prefill rate and the overhead learned."""


def main() -> None:
    """Parse flags, run, write the JSON."""
    parser = parser_of(__doc__, "demo")
    parser.add_argument("--engine", choices=("torch", "simulated"), default="torch")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--short-tokens", type=int, default=32)
    parser.add_argument("--long-tokens", type=int, default=4000)
    parser.add_argument("--requests", type=int, default=30, help="of each length, at least 5")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="further settings")
    arguments = parser.parse_args()
    if arguments.requests < 5:
        parser.error("--requests must be at least 5: fewer say nothing")
    flags = ["--model", arguments.model, "--replicas", str(arguments.replicas)]
    for setting in (f"engine={arguments.engine}", *arguments.set):
        flags += ["--set", setting]
    with instance(*flags) as url:
        results = asyncio.run(measure(url, arguments))
    ratios = {kind: [results[phase][kind]["ratio"]["p50"] for phase in (kind, "mixed")] for kind in KINDS}
    each = "; ".join(
        f"{kind} prompts {alone:.2f}, {mixed:.2f} among the others" for kind, (alone, mixed) in ratios.items()
    )
    write(arguments.json, vars(arguments), results, f"Actual TTFT / estimated, medians: {each}.")


async def measure(url: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Ask each kind of prompt alone, then all in turns; return the figures by phase and kind."""
    results: dict[str, Any] = {}
    async with httpx.AsyncClient(timeout=300) as client:
        asked = Asked(client, url, arguments)
        for name, kinds in (*((kind, [kind]) for kind in KINDS), ("mixed", list(KINDS))):
            for kind in kinds * (LEARNING // len(kinds)):
                await asked.once(kind)
            before = await regret(client, url)
            seen: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in kinds}
            for kind in progress(kinds * arguments.requests, name):
                seen[kind].append(await asked.once(kind))
            found = {kind: figures(times) for kind, times in seen.items()}
            results[name] = found | {"router": compared(before, await regret(client, url))}
    return results


class Asked:
    """Explains requests, sends them, and compares."""

    def __init__(self, client: httpx.AsyncClient, url: str, arguments: argparse.Namespace) -> None:
        self._client = client
        self._url = url
        self._arguments = arguments
        self._model = resolve_model(arguments.model)
        self._seed = 0

    async def once(self, kind: str) -> tuple[float, float, float]:
        """Ask one more request of that kind; return (estimated, work, actual) in seconds."""
        self._seed += 1
        short, long = self._arguments.short_tokens, self._arguments.long_tokens
        system = text_of(long, self._model, 0 if kind == "cached" else self._seed) if kind != "short" else None
        body = chat_body(self._arguments.model, 4, text_of(short, self._model, self._seed), system)
        told = (await self._client.post(f"{self._url}/v1/cache/explain", json=body)).raise_for_status().json()
        first = told["prompts"][0]["replicas"][0]
        answer = await stream_chat(self._client, self._url, body)
        return first["estimated_ttft_s"], first["work_s"], answer.ttft_s


async def regret(client: httpx.AsyncClient, url: str) -> dict[str, float]:
    """Return the acting policy's sums of estimated and actual times."""
    state = (await client.get(f"{url}/v1/cache/state")).raise_for_status().json()
    return {**state["regret"][state["policy"]]["ttft"], "overhead_s": state["ttft_overhead_s"]}


def figures(seen: Sequence[tuple[float, float, float]]) -> dict[str, Any]:
    """Return spreads: actual / estimated, the same of the work alone, and the times."""
    return {
        "requests": len(seen),
        "ratio": spread([actual_s / estimated_s for estimated_s, _, actual_s in seen]),
        "ratio_of_work_alone": spread([actual_s / work_s for _, work_s, actual_s in seen]),
        "estimated_ms": spread([1000 * estimated_s for estimated_s, _, _ in seen]),
        "actual_ms": spread([1000 * actual_s for _, _, actual_s in seen]),
    }


def compared(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Return actual over estimated of the sums between two looks, and the overhead at the later one."""
    estimated_s, actual_s = (after[name] - before[name] for name in ("estimated_s", "actual_s"))
    return {"ratio_of_sums": actual_s / estimated_s, "overhead_ms": 1000 * after["overhead_s"]}


if __name__ == "__main__":
    main()
