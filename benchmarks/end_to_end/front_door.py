"""The cost of a streamed token and a request outside the model: CPU time of each kind of process, from the kernel.

The engine is simulated. ``--models`` also measures the same settings as an entry of `models`, in turns;
``--vllm-python`` also measures `vllm serve` in that environment, on CPUs.
"""

import asyncio
import re
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.common.harness import Findings, Options, benchmark, flag, in_turns, rows_of, spreads
from benchmarks.common.prompts import text_of
from benchmarks.common.report import BenchmarkError, percentile
from benchmarks.common.server import MARK, instance, marked_processes
from benchmarks.peers.vllm_serve import CPU_ENVIRONMENT, vllm_server
from serve_app.checkpoints.sources import resolve_model
from serve_app.replay.client import RequestFailed, TimedAnswer, chat_body, stream_chat

KINDS = (
    ("ingress", r"ServeReplica:.*:Ingress"),
    ("replica", r"ServeReplica:.*:Replica"),
    ("haproxy", r"haproxy"),
    ("engine core", r"EngineCore"),
    ("api server", r"api_server"),
)
"""Kinds of processes by command line; all others are "other"."""

OURS = {"warmpath": [], "models": ["--set", "models=[{}]"]}
"""Our systems, each with its flags."""

SYSTEM_TOKENS, QUESTION_TOKENS, LONG_TOKENS = 200, 50, 4500


def cpu_s(mark: str) -> Counter[str]:
    """Return the user and system seconds of the marked processes, by kind."""
    used: Counter[str] = Counter()
    for process, command in marked_processes(mark):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            kind = next((kind for kind, pattern in KINDS if re.search(pattern, command)), "other")
            used[kind] += times.user + times.system
    return used


def cpu_used_s(mark: str, before: Counter[str]) -> dict[str, float]:
    """Return the seconds since ``before``, a result of ``cpu_s``, by kind; a kind that used none has 0."""
    return {kind: seconds - before[kind] for kind, seconds in sorted(cpu_s(mark).items())}


@contextmanager
def measured(system: str, options: Options) -> Iterator[tuple[str, str]]:
    """Run a system for the block; yield its URL and its processes' mark."""
    mark = uuid.uuid4().hex
    if system in OURS:
        flags = ["--model", options.model, "--engine", "simulated", "--replicas", str(options.replicas)]
        speed = ["--set", "simulated_prefill_tokens_per_s=1000000", "--set", "simulated_decode_step_s=0.02"]
        with instance(*flags, *speed, *OURS[system], env={MARK: mark}) as url:
            yield url, mark
        return
    flags = ["--dtype", "float32", "--block-size", "32", "--kv-cache-memory-bytes", str(1 << 30), "--enforce-eager"]
    python, env = str(options.vllm_python), {MARK: mark, **CPU_ENVIRONMENT}
    with vllm_server(resolve_model(options.model), options.model, flags, env, python) as url:
        yield url, mark


async def measure(url: str, mark: str, options: Options, run: int) -> dict[str, Any]:
    """Return the figures of one run; each run has its own prompts."""
    model = resolve_model(options.model)
    system = text_of(SYSTEM_TOKENS, model, 1)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=options.clients)
    async with httpx.AsyncClient(timeout=300, limits=limits) as client:

        async def cost(texts: Sequence[str], max_tokens: int, system: str | None, together: int) -> dict[str, Any]:
            """Return the CPU time per token, or per request with one token, with ``together`` concurrent requests."""
            free = asyncio.Semaphore(together)

            async def ask(text: str) -> TimedAnswer:
                async with free:
                    body = chat_body(options.model, max_tokens, text, system)
                    return await stream_chat(client, url, {**body, "ignore_eos": True})

            before = cpu_s(mark)
            answers = await asyncio.gather(*map(ask, texts))
            used = cpu_used_s(mark, before)
            tokens = sum(answer.completion_tokens for answer in answers)
            unit, factor = ("us_a_token", 1e6 / tokens) if max_tokens > 1 else ("ms_a_request", 1e3 / len(texts))
            ttft_ms = 1e3 * percentile([answer.ttft_s for answer in answers], 50)
            return {unit: {kind: factor * seconds for kind, seconds in used.items()}, "ttft_ms_p50": ttft_ms}

        def questions(count: int, tokens: int, first: int) -> list[str]:
            return [text_of(tokens, model, 100_000 * run + first + number) for number in range(count)]

        await cost(questions(4, QUESTION_TOKENS, 0), 8, system, 1)
        long = questions(options.long_requests, LONG_TOKENS, 10_000)
        return {
            "streamed": await cost(
                questions(2 * options.clients, QUESTION_TOKENS, 100), options.max_tokens, system, options.clients
            ),
            "short_warm": await cost(questions(options.short_requests, QUESTION_TOKENS, 5000), 1, system, 1),
            "long_new": await cost(long, 1, None, 1),
            "long_seen": await cost(long, 1, None, 1),
        }


@benchmark(
    __doc__,
    flag("runs", 5),
    flag("replicas", 2),
    flag("clients", 64, "concurrent streams"),
    flag("max-tokens", 256, "tokens of each streamed answer"),
    flag("short-requests", 300),
    flag("long-requests", 40),
    flag("models", False, "also measure the same settings as an entry of `models`"),
    flag("vllm-python", None, "the Python of an environment with vLLM, for comparison", type=Path),
    model="demo",
)
def run(options: Options) -> Findings:
    """Measure ours in turns, then vLLM's."""
    systems = ["warmpath", "models"] if options.models else ["warmpath"]
    results: dict[str, Any] = measured_in_turns(systems, options)
    if options.vllm_python:
        failures = (BenchmarkError, RequestFailed, httpx.HTTPError)  # ours is measured already, and stays
        results |= rows_of(["vllm serve"], lambda name: measured_in_turns([name], options)[name], failures)
    ours = results["warmpath"]["spread"]
    token, short = ours["streamed"]["us_a_token"], ours["short_warm"]["ms_a_request"]
    summary = (
        f"A streamed token costs {_figure(token['ingress'])} us in the ingress, {_figure(token['replica'])} in the "
        f"replica and {_figure(token['haproxy'])} in HAProxy (simulated engine; medians, and all runs); a "
        f"short warm request {_figure(short['ingress'], 1)} and {_figure(short['replica'], 1)} ms. "
        f"One core of an ingress carries {1e6 / token['ingress']['p50']:,.0f} tokens a second."
    )
    if options.models:
        results["models_ratios"] = ratios = {
            name: percentile([_total(one, name) / _total(other, name) for one, other in _pairs(results)], 50)
            for name in ours
        }
        rows = ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items())
        summary += f" As an entry of `models`, CPU over that of settings without (medians of turns): {rows}."
    return Findings(results, summary, more={"simulated": True})


def measured_in_turns(systems: Sequence[str], options: Options) -> dict[str, dict[str, Any]]:
    """Run systems at the same time, and measure them in turns; return the spread and the runs of each."""
    with ExitStack() as stack:
        places = {system: stack.enter_context(measured(system, options)) for system in systems}

        def turn(system: str, number: int) -> dict[str, Any]:
            return asyncio.run(measure(*places[system], options, number))

        runs = in_turns(systems, options.runs, turn)
    return {system: {"spread": spreads(rows), "runs": rows} for system, rows in runs.items()}


def _pairs(results: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the runs of each turn: with ``models``, and without."""
    yield from zip(results["models"]["runs"], results["warmpath"]["runs"], strict=True)


def _total(run: dict[str, Any], name: str) -> float:
    """Return the CPU of all processes for one token or request."""
    (cpu,) = (figure for figure in run[name].values() if isinstance(figure, dict))
    return float(sum(cpu.values()))


def _figure(values: dict[str, float], digits: int = 0) -> str:
    return "{p50:.{digits}f} ({min:.{digits}f} to {max:.{digits}f})".format(**values, digits=digits)
