"""Before the same two plain `vllm serve`: hit rate and TTFT of warmpath, power of two and smg, and the time added.

Needs vLLM in ``--vllm-python``, and for smg its command (`pip install smg`). Each system gets prompts of its own. The
time added is that of a request alone, before a server without a model: one client asks it, warmpath and smg in turns.
vLLM itself would add its workers on CPUs, which look for work for a second after each request.
"""

import asyncio
import json
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common.harness import Findings, Options, benchmark, flag, names_flag, note, rows_of
from benchmarks.common.prompts import text_of
from benchmarks.common.report import BenchmarkError, metric_sum, spread
from benchmarks.common.server import instance
from benchmarks.end_to_end.affinity import measure
from benchmarks.peers.smg import smg_server
from benchmarks.peers.vllm_serve import CPU_ENVIRONMENT, vllm_server
from benchmarks.peers.without_model import server_without_model
from serve_app.checkpoints.sources import resolve_model
from serve_app.cli.local_ray import held_port
from serve_app.config.workers import worker_of
from serve_app.replay.client import chat_body, stream_chat

SYSTEMS = ("warmpath", "power_of_two", "smg")
BLOCK, SERVERS = 32, 2
WARMING = 20


@benchmark(
    __doc__,
    flag("vllm-python", ".venv-vllm/bin/python"),
    flag("smg", None, "smg's command; without it, smg is not measured", type=Path),
    names_flag("systems", SYSTEMS, ",".join(SYSTEMS), f"of {', '.join(SYSTEMS)}; empty: the time added alone"),
    flag("runs", 5),
    flag("prompts", 24),
    flag("prompt-tokens", 800),
    flag("working-set", 0.6, "the prompts' share of both pools together"),
    flag("rounds", 5),
    flag("clients", 4),
    flag("alone", 1000, "requests of one token, for the time added; 0: not measured"),
    model="demo",
)
def run(options: Options) -> Findings:
    """Start the servers once, and run each system before them."""
    options.engine = "vllm"
    results: dict[str, Any] = {}
    with workers(options) as entries:

        def row(system: str) -> dict[str, Any]:
            first = 1000 * (options.systems.index(system) + 1)
            with front(system, entries, options) as url:
                runs = [
                    asyncio.run(measure(url, system, options, first=first + 100 * run)) for run in range(options.runs)
                ]
                return figures(runs) | (predictions(url) if system == "warmpath" else {})

        results |= rows_of(options.systems, row)
    if options.alone:
        results["alone"] = alone(options)
    return Findings(results, summary(results))


def figures(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the median, least and most of each run's hit rate and mean TTFT of repeats."""
    rows = {"hit_rate": [run["hit_rate"] for run in runs], "ttft_ms": [run["repeat_ttft_ms_mean"] for run in runs]}
    return {name: [statistics.median(row), min(row), max(row)] for name, row in rows.items()}


def summary(results: dict[str, Any]) -> str:
    """Return a sentence with the systems' figures."""
    measured = {name: row for name, row in results.items() if "hit_rate" in row}
    rows = "; ".join(f"{name}: {row['hit_rate'][0]:.1%}, {_times(*row['ttft_ms'])}" for name, row in measured.items())
    more = ""
    if "right" in results.get("warmpath", {}):
        more += f" Predictions right: {results['warmpath']['right']:.2%}."
    if added := results.get("alone"):
        times = ", ".join(f"{name} {row['added_ms']:.1f} ms" for name, row in added.items() if name != "server")
        more += f" Added to a request alone, before a server without a model (medians): {times}."
    if not measured:
        return more.strip()
    return f"Hit rate and mean TTFT of repeated prompts (medians of the runs, least and most). {rows}.{more}"


def _times(middle: float, least: float, most: float) -> str:
    return f"{middle:.0f} ms ({least:.0f}-{most:.0f})"


@contextmanager
def workers(options: Options) -> Iterator[list[str]]:
    """Run the servers, if a system is measured; yield them as entries of the setting `workers`."""
    needed = options.prompts * math.ceil(options.prompt_tokens / BLOCK)
    blocks = math.ceil(needed / (options.working_set * SERVERS))
    sizes = (
        f"--dtype float32 --enforce-eager --max-model-len 2048 --block-size {BLOCK} --num-gpu-blocks-override {blocks}"
    )
    with ExitStack() as stack:
        entries = []
        for _ in range(SERVERS if options.systems else 0):
            events, replay = (stack.enter_context(held_port()) for _ in range(2))
            addresses = {"endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://127.0.0.1:{replay}"}
            events_config = {"enable_kv_cache_events": True, "publisher": "zmq", **addresses}
            flags = [
                *sizes.split(),
                "--kv-cache-memory-bytes",
                str(1 << 30),
                "--kv-events-config",
                json.dumps(events_config),
            ]
            model, python = resolve_model(options.model), options.vllm_python
            url = stack.enter_context(vllm_server(model, options.model, flags, CPU_ENVIRONMENT, python, 600.0))
            entries.append(f"{url}?events={events}&replay={replay}")
        yield entries


@contextmanager
def front(system: str, entries: list[str], options: Options) -> Iterator[str]:
    """Run a system before the servers; yield its URL."""
    if system == "smg":
        if options.smg is None:
            raise BenchmarkError("no --smg")
        with smg_server(options.smg, [worker_of(entry).url for entry in entries]) as url:
            yield url
        return
    policy = "estimated_ttft" if system == "warmpath" else system
    flags = [part for entry in entries for part in ("--worker", entry)]
    with instance("--engine", "remote", "--model", options.model, "--policy", policy, *flags) as url:
        yield url


def predictions(url: str) -> dict[str, float]:
    """Return how many predictions warmpath has compared with an answer, and the share of right ones."""
    text = httpx.get(f"{url}/metrics", timeout=30).raise_for_status().text
    right, wrong = (
        metric_sum(text, "warmpath_worker_predictions_total", f'result="{result}"') for result in ("right", "wrong")
    )
    return {"predictions": right + wrong, "right": right / max(1.0, right + wrong)}


def alone(options: Options) -> dict[str, dict[str, float]]:
    """Return the TTFT of a request alone at a server without a model and through what stands before it, in ms."""
    with ExitStack() as stack:
        urls = {"server": stack.enter_context(server_without_model(options.model))}
        for system in ("warmpath", "smg"):
            if system != "smg" or options.smg is not None:
                urls[system] = stack.enter_context(front(system, [urls["server"]], options))
        note("a client alone asks each in turns")
        times = asyncio.run(in_turns(urls, options))
    base = statistics.median(times["server"])
    return {
        name: {"mean_ms": statistics.mean(row), **spread(row), "added_ms": statistics.median(row) - base}
        for name, row in times.items()
    }


async def in_turns(urls: dict[str, str], options: Options) -> dict[str, list[float]]:
    """Return each system's first tokens in ms, of one short prompt that is cached, in orders drawn anew."""
    body = chat_body(options.model, 1, "Which side is port?", text_of(100, resolve_model(options.model), 9999))
    times: dict[str, list[float]] = {name: [] for name in urls}
    chance = random.Random(1)
    async with httpx.AsyncClient(timeout=300) as client:
        for number in range(-WARMING, options.alone):
            for name in chance.sample(sorted(urls), len(urls)):
                answer = await stream_chat(client, urls[name], body)
                if number >= 0:
                    times[name].append(1000 * answer.ttft_s)
    return times
