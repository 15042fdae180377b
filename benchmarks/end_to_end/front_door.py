"""The cost of a streamed token and a request outside the model: CPU time and wake-ups of each kind of process.

Both are the kernel's counts. A wake-up is a thread that waited and runs again (a voluntary switch). ``--strace`` counts
system calls too, in a pass of their own: it slows what it watches.

The engine is simulated. ``--models`` also measures the same settings as an entry of `models`, in turns;
``--vllm-python`` also measures `vllm serve` in that environment, on CPUs, with each of its front doors.
"""

import asyncio
import re
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

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
    ("ray: controller", r"ServeController"),
    ("ray: proxies", r"ProxyActor|HAProxyManager"),
    ("ray: gcs", r"gcs_server"),
    ("ray: raylet", r"raylet/raylet"),
    ("ray: agents", r"DashboardAgent|RuntimeEnvAgent|log_monitor|dashboard\.py|monitor\.py"),
    ("haproxy", r"haproxy"),
    ("engine core", r"VLLM::(EngineCore|Worker)"),
    ("api server", r"VLLM::APIServer|vllm\.entrypoints|vllm-rs"),
)
"""Kinds of processes by command line, the first that fits; all others are "other"."""

OURS = {"warmpath": [], "models": ["--set", "models=[{}]"]}
"""Our systems, each with its flags."""
VLLM = {"vllm serve": {}, "vllm serve, Rust": {"VLLM_USE_RUST_FRONTEND": "1"}}
"""vLLM's front doors, each with its environment; its CPU packages have no Rust one (`VLLM_RUST_FRONTEND_PATH`)."""

UNITS = ("us_a_token", "ms_a_request")

TRACED = ("ingress", "replica", "haproxy", "api server")
"""Kinds whose system calls are counted: those on the way of a token."""

IDLE_S = 3.0

SYSTEM_TOKENS, QUESTION_TOKENS, LONG_TOKENS = 200, 50, 4500


class Used(NamedTuple):
    """User and system seconds, and wake-ups, of the marked processes, by kind."""

    cpu_s: Counter[str]
    wakeups: Counter[str]


def used_so_far(mark: str) -> Used:
    """Return what the marked processes have used."""
    used = Used(Counter(), Counter())
    for process, command in marked_processes(mark):
        with suppress(psutil.NoSuchProcess, OSError):
            times = process.cpu_times()
            kind = next((kind for kind, pattern in KINDS if re.search(pattern, command)), "other")
            used.cpu_s[kind] += times.user + times.system
            used.wakeups[kind] += wakeups(process.pid)
    return used


def wakeups(pid: int) -> int:
    """Return how often a process' threads have waited and run again."""
    count = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # it has ended
            found = re.search(r"^voluntary_ctxt_switches:\s+(\d+)", (thread / "status").read_text(), re.M)
            count += int(found[1]) if found else 0
    return count


@contextmanager
def system_calls(mark: str) -> Iterator[dict[str, Counter[str]]]:
    """Count the system calls of the block by kind of process and name, those of idle threads too; see TRACED.

    The counters are filled at the end of the block. Raises BenchmarkError without strace, or if it may not attach.
    """
    counts: dict[str, Counter[str]] = {}
    strace = shutil.which("strace")
    if strace is None:
        raise BenchmarkError("no strace: apt-get install strace")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as watching:
        for process, command in marked_processes(mark):
            kind = next((kind for kind, pattern in KINDS if re.search(pattern, command)), "other")
            if kind in TRACED:
                watching.callback(_add_calls, counts.setdefault(kind, Counter()), Path(folder, str(process.pid)))
                watching.enter_context(_traced(strace, process.pid, Path(folder, str(process.pid))))
        yield counts


@contextmanager
def _traced(strace: str, pid: int, table: Path) -> Iterator[None]:
    """Attach strace to a process for the block; it writes its counts to ``table``."""
    command = [strace, "-f", "-c", "-U", "calls,name", "-o", str(table), "-p", str(pid)]
    watcher = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert watcher.stderr is not None
    try:
        said = watcher.stderr.readline()  # it has attached, or why not
        if "attached" not in said:
            raise BenchmarkError(f"strace: {said.strip()}")
        yield
    finally:
        watcher.send_signal(signal.SIGINT)
        watcher.communicate()


def _add_calls(counts: Counter[str], table: Path) -> None:
    for calls, name in re.findall(r"^\s*(\d+)\s+(\w+)$", table.read_text(), re.M):
        if name != "total":
            counts[name] += int(calls)


def since(before: Counter[str], now: Counter[str], factor: float) -> dict[str, float]:
    """Return the difference by kind, times ``factor``; a kind without use has 0."""
    return {kind: factor * (count - before[kind]) for kind, count in sorted(now.items())}


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
    python, env = str(options.vllm_python), {MARK: mark, **CPU_ENVIRONMENT, **VLLM[system]}
    with vllm_server(resolve_model(options.model), options.model, flags, env, python) as url:
        yield url, mark


async def count_calls(url: str, mark: str, options: Options) -> dict[str, Any]:
    """Return the system calls a second of idle processes, and what a token and a short warm request add to them."""
    model = resolve_model(options.model)
    system = text_of(SYSTEM_TOKENS, model, 1)
    async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=None)) as client:

        async def ask(number: int, max_tokens: int) -> int:
            text = text_of(QUESTION_TOKENS, model, 900_000 + number)
            body = chat_body(options.model, max_tokens, text, system)
            return (await stream_chat(client, url, {**body, "ignore_eos": True})).completion_tokens

        await ask(0, 8)
        with system_calls(mark) as idle:
            await asyncio.sleep(IDLE_S)
        started_s = time.monotonic()
        with system_calls(mark) as streamed:
            tokens = sum(await asyncio.gather(*(ask(1 + each, options.max_tokens) for each in range(options.clients))))
        between_s = time.monotonic()
        requests = max(options.short_requests // 3, 1)
        with system_calls(mark) as short:
            for each in range(requests):
                await ask(10_000 + each, 1)
        ended_s = time.monotonic()

    def busy(counts: dict[str, Counter[str]], seconds: float, by: int) -> dict[str, dict[str, float]]:
        return {
            kind: {call: max(count - idle[kind][call] * seconds / IDLE_S, 0.0) / by for call, count in calls.items()}
            for kind, calls in counts.items()
        }

    return {
        "idle_a_second": {
            kind: {call: count / IDLE_S for call, count in calls.items()} for kind, calls in idle.items()
        },
        "a_token": busy(streamed, between_s - started_s, tokens),
        "a_request": busy(short, ended_s - between_s, requests),
    }


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

            before = used_so_far(mark)
            answers = await asyncio.gather(*map(ask, texts))
            used = used_so_far(mark)
            tokens = sum(answer.completion_tokens for answer in answers)
            unit, scale, count = (UNITS[0], 1e6, tokens) if max_tokens > 1 else (UNITS[1], 1e3, len(texts))
            return {
                unit: since(before.cpu_s, used.cpu_s, scale / count),
                "wakeups": since(before.wakeups, used.wakeups, 1 / count),
                "ttft_ms_p50": 1e3 * percentile([answer.ttft_s for answer in answers], 50),
            }

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
    flag("strace", False, "also count system calls, by strace"),
    flag("vllm-python", None, "the Python of an environment with vLLM, for comparison", type=Path),
    model="demo",
)
def run(options: Options) -> Findings:
    """Measure ours in turns, then vLLM's."""
    systems = ["warmpath", "models"] if options.models else ["warmpath"]
    results: dict[str, Any] = measured_in_turns(systems, options)
    if options.vllm_python:
        failures = (BenchmarkError, RequestFailed, httpx.HTTPError)  # ours is measured already, and stays
        results |= rows_of(list(VLLM), lambda name: measured_in_turns([name], options)[name], failures)
    ours = results["warmpath"]["spread"]
    token, short = ours["streamed"]["us_a_token"], ours["short_warm"]["ms_a_request"]
    summary = (
        f"A streamed token costs {_figure(token['ingress'])} us in the ingress, {_figure(token['replica'])} in the "
        f"replica and {_figure(token['haproxy'])} in HAProxy (simulated engine; medians, and all runs); a "
        f"short warm request {_figure(short['ingress'], 1)} and {_figure(short['replica'], 1)} ms. "
        f"One core of an ingress carries {1e6 / token['ingress']['p50']:,.0f} tokens a second."
    )
    if options.strace:
        calls = results["warmpath"]["system_calls"]
        shown = [
            f"{name} {sum(calls['a_token'][name].values()):.1f} and {sum(calls['a_request'][name].values()):.0f}"
            for name in calls["a_token"]
        ]
        summary += f" System calls that a token and a short request add to those of idle processes: {', '.join(shown)}."
    if options.models:
        results["models_ratios"] = ratios = {
            name: percentile([_total(one, name) / _total(other, name) for one, other in _pairs(results)], 50)
            for name in ours
        }
        rows = ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items())
        summary += f" As an entry of `models`, CPU over that of settings without (medians of turns): {rows}."
    for name in VLLM:
        if "spread" in results.get(name, ()):
            theirs = results[name]["runs"]
            shown = [f"{row} {_ratio(results['warmpath']['runs'], theirs, row)}" for row in ("streamed", "short_warm")]
            summary += f" CPU of all processes over that of {name} without its engine core: {', '.join(shown)}."
    return Findings(results, summary, more={"simulated": True})


def _ratio(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]], row: str) -> str:
    """Return the ratio of the medians, and of the extremes. Our engine is simulated, so theirs does not count."""
    mine = sorted(_total(run, row) for run in ours)
    other = sorted(_total(run, row, "engine core") for run in theirs)
    middle = percentile(mine, 50) / percentile(other, 50)
    return f"{middle:.2f} ({mine[0] / other[-1]:.2f} to {mine[-1] / other[0]:.2f})"


def measured_in_turns(systems: Sequence[str], options: Options) -> dict[str, dict[str, Any]]:
    """Run systems at the same time, and measure them in turns; return the spread and the runs of each."""
    with ExitStack() as stack:
        places = {system: stack.enter_context(measured(system, options)) for system in systems}

        def turn(system: str, number: int) -> dict[str, Any]:
            return asyncio.run(measure(*places[system], options, number))

        runs = in_turns(systems, options.runs, turn)
        results = {system: {"spread": spreads(rows), "runs": rows} for system, rows in runs.items()}
        if options.strace:
            for system, place in places.items():
                results[system]["system_calls"] = asyncio.run(count_calls(*place, options))
    return results


def _pairs(results: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the runs of each turn: with ``models``, and without."""
    yield from zip(results["models"]["runs"], results["warmpath"]["runs"], strict=True)


def _total(run: dict[str, Any], name: str, without: str = "") -> float:
    """Return the CPU of all processes for one token or request, but for one kind."""
    used = next(run[name][unit] for unit in UNITS if unit in run[name])
    return float(sum(cpu for kind, cpu in used.items() if kind != without))


def _figure(values: dict[str, float], digits: int = 0) -> str:
    return "{p50:.{digits}f} ({min:.{digits}f} to {max:.{digits}f})".format(**values, digits=digits)
