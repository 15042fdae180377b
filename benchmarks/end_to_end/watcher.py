"""What one watcher of the event stream costs: answers a second over HTTP, with an operator's stream open and without.

Simulated replicas that answer at once, so that the ingress is what limits. The watcher is a process of its own on the
same machine, as a browser may be, and what it takes counts. `python -m benchmarks watcher --json FILE`
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from benchmarks.common.client import chat_body
from benchmarks.common.paired import alternate, ratios
from benchmarks.common.prompts import text_of
from benchmarks.common.report import parser_of, write
from benchmarks.common.server import instance
from benchmarks.end_to_end.recorder import EVENTS
from serve_app.checkpoints.sources.resolve import resolve_model

PREFIXES = 20
_WATCH = """
import sys, httpx
with httpx.stream("GET", sys.argv[1], timeout=30) as answer:
    parts = answer.iter_bytes()
    print(len(next(parts)), flush=True)
    for _ in parts:
        pass
"""


def main() -> None:
    """Parse flags, run, write the JSON."""
    parser = parser_of(__doc__, "demo")
    parser.add_argument("--prefix-tokens", type=int, default=400)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=400, help="of each run")
    parser.add_argument("--pairs", type=int, default=9, help="of runs with and without a watcher, at least 5")
    arguments = parser.parse_args()
    if arguments.pairs < 5:
        parser.error("--pairs must be at least 5: fewer say nothing")
    found = asyncio.run(_measure(arguments))
    low, high = found["interval"]
    on, off = found["measured"]["p50"], found["against"]["p50"]
    said = (
        f"Answers a second with one watcher / with none, simulated engines, {arguments.pairs} pairs: "
        f"{found['ratio']:.3f} (95 %: {low:.3f} to {high:.3f}); medians {on:.0f} and {off:.0f}."
    )
    write(arguments.json, vars(arguments), {"throughput_ratio": found["ratio"], "details": found}, said)


async def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    model = resolve_model(arguments.model)
    systems = [text_of(arguments.prefix_tokens, model, number) for number in range(PREFIXES)]
    fast = ("--set", "simulated_prefill_tokens_per_s=10000000", "--set", "simulated_decode_step_s=0.0001")
    with instance("--model", arguments.model, "--engine", "simulated", *fast) as url:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:

            async def answers_per_s(watched: bool) -> float:
                with _watching(url + EVENTS) if watched else _nobody():
                    return await _throughput(client, arguments, systems)

            await answers_per_s(False)  # connections and caches are paid by a run that counts for nothing
            return ratios(
                *await alternate(arguments.pairs, lambda _: answers_per_s(True), lambda _: answers_per_s(False))
            )


async def _throughput(client: httpx.AsyncClient, arguments: argparse.Namespace, systems: list[str]) -> float:
    """Return answers a second of clients that each ask again as soon as they are answered."""
    left = iter(range(arguments.requests))

    async def ask() -> None:
        for number in left:
            body = chat_body(arguments.model, 2, f"Question {number}", systems[number % PREFIXES])
            answer = await client.post("/v1/chat/completions", json=body)
            answer.raise_for_status()

    began_s = time.monotonic()
    await asyncio.gather(*(ask() for _ in range(arguments.clients)))
    return float(arguments.requests / (time.monotonic() - began_s))


@contextmanager
def _watching(url: str) -> Iterator[None]:
    """Read the stream in a process of its own, from its snapshot on."""
    with subprocess.Popen([sys.executable, "-c", _WATCH, url], stdout=subprocess.PIPE) as watcher:
        try:
            assert watcher.stdout is not None
            if not watcher.stdout.readline():
                raise RuntimeError("the event stream ended before its snapshot")
            yield
            if watcher.poll() is not None:
                raise RuntimeError("the event stream ended before the run did")
        finally:
            watcher.kill()


@contextmanager
def _nobody() -> Iterator[None]:
    yield


if __name__ == "__main__":
    main()
