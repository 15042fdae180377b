"""Before the same two plain `vllm serve`: hit rate and TTFT of warmpath, power of two and smg, and the time added.

Needs vLLM in ``--vllm-python``, and for smg its command (`pip install smg`). Each system gets prompts of its own. The
time added is that of a warm request alone: one client asks the first server, warmpath and smg in turns.
"""

import argparse
import asyncio
import json
import math
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common.prompts import text_of
from benchmarks.common.report import metric_sum, names_of, parser_of, spread, write
from benchmarks.common.server import instance, server_process
from benchmarks.end_to_end.affinity import measure
from benchmarks.peers.vllm_serve import CPU_ENVIRONMENT, vllm_server
from serve_app.checkpoints.sources import resolve_model
from serve_app.cli.bench import chat_body, stream_chat
from serve_app.cli.local_ray import held_port
from serve_app.config.workers import worker_of

SYSTEMS = ("warmpath", "power_of_two", "smg")
BLOCK, SERVERS = 32, 2
WARMING = 20


def main() -> None:
    """Parse flags, start the servers once, run each system before them, write the JSON."""
    parser = parser_of(__doc__, "demo")
    parser.add_argument("--vllm-python", default=".venv-vllm/bin/python")
    parser.add_argument("--smg", type=Path, help="smg's command; without it, smg is not measured")
    parser.add_argument("--systems", type=names_of(SYSTEMS), default=",".join(SYSTEMS))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--prompt-tokens", type=int, default=800)
    parser.add_argument("--working-set", type=float, default=0.6, help="the prompts' share of both pools together")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--alone", type=int, default=200, help="warm requests of one token, for the time added")
    arguments = parser.parse_args()
    arguments.engine = "vllm"
    results: dict[str, Any] = {}
    with workers(arguments) as entries:
        for number, system in enumerate(arguments.systems):
            if system == "smg" and arguments.smg is None:
                results[system] = {"not_measured": "no --smg"}
                continue
            with front(system, entries, arguments) as url:
                runs = [
                    asyncio.run(measure(url, system, arguments, first=1000 * (number + 1) + 100 * run))
                    for run in range(arguments.runs)
                ]
                results[system] = figures(runs)
                if system == "warmpath":
                    results[system] |= predictions(url)
            print(f"{system}: {json.dumps(results[system])}", file=sys.stderr)
        if arguments.alone:
            results["alone"] = alone(entries, arguments)
    write(arguments.json, vars(arguments), results, summary(results))


def figures(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the median, least and most of each run's hit rate and mean TTFT of repeats."""
    rows = {"hit_rate": [run["hit_rate"] for run in runs], "ttft_ms": [run["repeat_ttft_ms_mean"] for run in runs]}
    return {name: [statistics.median(row), min(row), max(row)] for name, row in rows.items()}


def summary(results: dict[str, Any]) -> str:
    """Return a sentence with the systems' figures."""
    measured = {name: row for name, row in results.items() if "hit_rate" in row}
    rows = "; ".join(f"{name}: {row['hit_rate'][0]:.1%}, {_times(*row['ttft_ms'])}" for name, row in measured.items())
    more = ""
    if ours := results.get("warmpath"):
        more += f" Predictions right: {ours['right']:.2%}."
    if added := results.get("alone"):
        told = ", ".join(f"{name} {row['added_ms']:.1f} ms" for name, row in added.items() if name != "server")
        more += f" Added to a warm request alone: {told}."
    return f"Hit rate and mean TTFT of repeated prompts (medians of the runs, least and most). {rows}.{more}"


def _times(middle: float, least: float, most: float) -> str:
    return f"{middle:.0f} ms ({least:.0f}-{most:.0f})"


@contextmanager
def workers(arguments: argparse.Namespace) -> Iterator[list[str]]:
    """Run the servers; yield them as entries of the setting `workers`."""
    needed = arguments.prompts * math.ceil(arguments.prompt_tokens / BLOCK)
    blocks = math.ceil(needed / (arguments.working_set * SERVERS))
    sizes = (
        f"--dtype float32 --enforce-eager --max-model-len 2048 --block-size {BLOCK} --num-gpu-blocks-override {blocks}"
    )
    with ExitStack() as stack:
        entries = []
        for _ in range(SERVERS):
            events, replay = (stack.enter_context(held_port()) for _ in range(2))
            addresses = {"endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://127.0.0.1:{replay}"}
            told = {"enable_kv_cache_events": True, "publisher": "zmq", **addresses}
            flags = [*sizes.split(), "--kv-cache-memory-bytes", str(1 << 30), "--kv-events-config", json.dumps(told)]
            model, python = resolve_model(arguments.model), arguments.vllm_python
            url = stack.enter_context(vllm_server(model, arguments.model, flags, CPU_ENVIRONMENT, python, 600.0))
            entries.append(f"{url}?events={events}&replay={replay}")
        yield entries


@contextmanager
def front(system: str, entries: list[str], arguments: argparse.Namespace) -> Iterator[str]:
    """Run a system before the servers; yield its URL."""
    if system != "smg":
        policy = "estimated_ttft" if system == "warmpath" else system
        flags = [flag for entry in entries for flag in ("--worker", entry)]
        with instance("--engine", "remote", "--model", arguments.model, "--policy", policy, *flags) as url:
            yield url
        return
    with held_port() as port, held_port() as metrics:
        command = [str(arguments.smg), "launch", "--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware"]
        command += ["--backend", "vllm", "--prometheus-port", str(metrics), "--worker-urls"]
        command += [worker_of(entry).url for entry in entries]
        url = f"http://127.0.0.1:{port}"
        with server_process(command, f"{url}/readiness"):  # its /health answers before it knows its servers
            yield url


def predictions(url: str) -> dict[str, float]:
    """Return how many predictions warmpath has compared with an answer, and the share of right ones."""
    text = httpx.get(f"{url}/metrics", timeout=30).raise_for_status().text
    right, wrong = (
        metric_sum(text, "warmpath_worker_predictions_total", f'result="{result}"') for result in ("right", "wrong")
    )
    return {"predictions": right + wrong, "right": right / max(1.0, right + wrong)}


def alone(entries: list[str], arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the TTFT of a warm request alone at the first server and through what stands before it, in ms."""
    with ExitStack() as stack:
        urls = {"server": worker_of(entries[0]).url}
        for system in ("warmpath", "smg"):
            if system != "smg" or arguments.smg is not None:
                urls[system] = stack.enter_context(front(system, entries[:1], arguments))
        print("a client alone asks each in turns", file=sys.stderr, flush=True)
        times = asyncio.run(in_turns(urls, arguments))
    base = statistics.median(times["server"])
    return {
        name: {"mean_ms": statistics.mean(row), **spread(row), "added_ms": statistics.median(row) - base}
        for name, row in times.items()
    }


async def in_turns(urls: dict[str, str], arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Return each system's first tokens in ms, of one short prompt that is cached, in orders drawn anew."""
    body = chat_body(arguments.model, 1, "Which side is port?", text_of(100, resolve_model(arguments.model), 9999))
    times: dict[str, list[float]] = {name: [] for name in urls}
    chance = random.Random(1)
    async with httpx.AsyncClient(timeout=300) as client:
        for number in range(-WARMING, arguments.alone):
            for name in chance.sample(sorted(urls), len(urls)):
                answer = await stream_chat(client, urls[name], body)
                if number >= 0:
                    times[name].append(1000 * answer.ttft_s)
    return times


if __name__ == "__main__":
    main()
