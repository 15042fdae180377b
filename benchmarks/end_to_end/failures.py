"""Replicas are killed under streams: does every answer stay what it would have been, and how long does it pause?

Streams are asked undisturbed, then again under another salt while the replica that runs most is killed by SIGKILL. The
pause is a stream's longest silence that began at the kill or after. Simulated engines, real Ray Serve on one machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
from typing import Any

import httpx

from benchmarks.common.client import Answer, RequestFailed, stream_answer
from benchmarks.common.prompts import text_of
from benchmarks.common.report import parser_of, progress, spread, write
from benchmarks.common.server import instance
from serve_app.checkpoints.sources.resolve import resolve_model

MAX_TOKENS = 120
SETTINGS = {
    "engine": "simulated",
    "simulated_prefill_tokens_per_s": 4000,
    "simulated_decode_step_s": 0.02,
}
UP_TIMEOUT_S = 120.0


def main() -> None:
    """Parse flags, run, write the JSON; exit status 1 where an answer was lost or altered."""
    parser = parser_of(__doc__, "demo")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--streams", type=int, default=6)
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    arguments = parser.parse_args()
    if arguments.replicas < 2:
        parser.error("--replicas must be at least 2: one is left at any moment")
    flags = [f"--set={name}={value}" for name, value in SETTINGS.items()]
    with instance("--model", arguments.model, "--replicas", str(arguments.replicas), *flags) as url:
        results = asyncio.run(measure(url, arguments))
    write(arguments.json, vars(arguments), {"engine": "simulated", **results}, summary(results))
    if results["lost"] or results["altered"]:
        raise SystemExit(1)


def summary(results: dict[str, Any]) -> str:
    """Return what became of the answers, and how long interrupted streams paused."""
    return (
        f"{results['kills']} replicas killed under {results['answers']} streams (simulated engines): "
        f"{results['lost']} lost, {results['altered']} altered. A stream that was interrupted paused for "
        f"{results['pause_over_ttft']['p50']:.2g} times its undisturbed time to the first token (median), "
        f"{results['pause_over_ttft']['max']:.2g} at most."
    )


async def measure(url: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Kill as often as asked for; return what became of the answers."""
    model = resolve_model(arguments.model)
    killed: set[str] = set()
    lost = altered = 0
    pauses: list[float] = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=UP_TIMEOUT_S, limits=limits) as client:
        for kill in progress(range(arguments.kills), "kills"):
            bodies = [
                {
                    "model": arguments.model,
                    "prompt": text_of(arguments.prompt_tokens, model, kill * arguments.streams + number),
                    "max_tokens": MAX_TOKENS,
                    "ignore_eos": True,
                    "temperature": number % 2,
                    "seed": number,
                }
                for number in range(arguments.streams)
            ]
            await _until_whole(client, arguments.replicas, killed)
            expected = await asyncio.gather(*(_ask(client, {**body, "cache_salt": "alone"}) for body in bodies))
            began_s = time.perf_counter()
            asked = [asyncio.create_task(_ask(client, body)) for body in bodies]
            # Half of a stream's tokens later all of them are in the middle.
            await asyncio.sleep(max(answer.ttft_s for answer in expected if answer) + MAX_TOKENS / 2 * 0.02)
            interrupted = await _kill_busiest(client, killed)
            struck_s = time.perf_counter() - began_s
            answers = await asyncio.gather(*asked)
            lost += sum(answer is None for answer in answers)
            pairs = [(a, b) for a, b in zip(answers, expected, strict=True) if a is not None and b is not None]
            altered += sum(a.text != b.text for a, b in pairs)
            silences = [(a.gap_s, a.gap_s / b.ttft_s) for a, b in pairs if a.gap_at_s + a.gap_s > struck_s]
            pauses += [over_ttft for _, over_ttft in sorted(silences)[-interrupted:]] if interrupted else []
    return {
        "kills": len(killed),
        "answers": arguments.kills * arguments.streams,
        "lost": lost,
        "altered": altered,
        "interrupted": len(pauses),
        "pause_over_ttft": spread(pauses or [0.0]),
    }


async def _ask(client: httpx.AsyncClient, body: dict[str, Any]) -> Answer | None:
    """Return the answer; None where there is none, or not all of it."""
    try:
        return await stream_answer(client, "/v1/completions", body)
    except (httpx.HTTPError, RequestFailed):
        return None


async def _replicas(client: httpx.AsyncClient, killed: set[str]) -> list[dict[str, Any]]:
    state = (await client.get("/v1/cache/state")).raise_for_status().json()
    return [row for row in state["replicas"] if "pid" in row and row["replica_id"] not in killed]


async def _until_whole(client: httpx.AsyncClient, replicas: int, killed: set[str]) -> None:
    async with asyncio.timeout(UP_TIMEOUT_S):
        while len(await _replicas(client, killed)) < replicas:  # noqa: ASYNC110 (nothing tells when)
            await asyncio.sleep(0.1)


async def _kill_busiest(client: httpx.AsyncClient, killed: set[str]) -> int:
    """Kill the replica that runs most; return how many sequences it ran, by its last report."""
    victim = max(await _replicas(client, killed), key=lambda row: int(row["running_sequences"]))
    os.kill(victim["pid"], signal.SIGKILL)
    killed.add(victim["replica_id"])
    return int(victim["running_sequences"])


if __name__ == "__main__":
    main()
