"""AgentX, the scenario of aiperf for agents, beside other routers: hit rate of the possible, TTFT, ITL, throughput.

aiperf (`make agentx` installs it) replays sessions of the published trace in its `weka_trace` form, each session with
an opening of its own. Two replicas serve them: with the engine `simulated` at the speeds of an H100 for a model of 8B,
where a token of a prompt stands for `--scale` ones, so rate and pool are as much smaller and seconds are the same; or
with a real model. Ray's prefix rule and smg stand before two servers of one replica each, with our engine in them.
The scenario accepts as a valid submission only its authors' dataset, from their server, over 900 s or more: no run
here is one, and the report says what it refuses. `--virtual-runs N` simulates the clients too, in virtual time and
without aiperf and smg: N runs, each with its own seed, in seconds.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.common.agent_sessions import AgentSession, AgentTurn, read_sessions
from benchmarks.common.harness import Findings, Options, benchmark, engine_flag, flag, names_flag, rows_of
from benchmarks.common.report import BenchmarkError
from benchmarks.common.server import instance, server_process, set_flags
from benchmarks.end_to_end.agents import drawn
from benchmarks.peers.smg import smg_server
from benchmarks.simulation.agentx import AgentX
from benchmarks.simulation.cluster import Cluster
from benchmarks.simulation.front_door import RAY_PREFIX
from benchmarks.simulation.settings import ClusterSettings, Contender
from serve_app.checkpoints.reuse import TRACE_BLOCK_TOKENS
from serve_app.checkpoints.sources import resolve_model
from serve_app.cli.local_ray import held_port
from serve_app.config.engine import ENGINES

SCENARIO, SHORTEST_S = "inferencex-agentx-mvp", 900
REPLICAS, BLOCK = 2, 16
SERVED = "demo"
"""The name by which sessions ask for the model, whichever it is."""
POLICIES = {"warmpath": "estimated_ttft", "round_robin": "round_robin", "power_of_two": "power_of_two"}
"""Systems that are policies of our router; none but ours copies KV between replicas."""
SYSTEMS = (*POLICIES, "ray_prefix", "smg")
VIRTUAL = {
    **{
        name: Contender(policy, shortest_first=True, pull=name == "warmpath", admission=True)
        for name, policy in POLICIES.items()
    },
    "ray_prefix": Contender(RAY_PREFIX, shortest_first=True, admission=True),
}
"""The same systems in virtual time: all have our engine."""
PREFILL_TOKENS_PER_S, DECODE_STEP_S, KV_TOKENS = 24_500.0, 0.0074, 690_000
"""An H100's, for Llama-3.1-8B's sizes (`log/vllm.md`): a prompt of 32,768 tokens, a step of 16 streams, and 45 GB of
KV at 64 KiB a token."""

FIGURES: Mapping[str, tuple[str, str]] = {
    "delivered": ("overall_usage_prompt_cache_read_pct", "avg"),
    "theoretical": ("theoretical_prefix_cache_hit", "avg"),
    "ttft_ms_mean": ("time_to_first_token", "avg"),
    "ttft_ms_p50": ("time_to_first_token", "p50"),
    "ttft_ms_p90": ("time_to_first_token", "p90"),
    "itl_ms_mean": ("inter_token_latency", "avg"),
    "answer_ms_mean": ("request_latency", "avg"),
    "output_tokens_per_s": ("output_token_throughput", "avg"),
    "requests": ("request_count", "avg"),
}
"""Our names -> aiperf's metrics and their statistics. Percents become parts of 1."""


def weka_trace(name: str, session: AgentSession, scale: int) -> dict[str, Any]:
    """Return a session as aiperf's loader reads it, timed as on an H100 without a queue and with an endless cache."""
    size = TRACE_BLOCK_TOKENS // scale

    def requests(stream_at: int, start_s: float) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = []
        now_s = start_s
        for number, turn in enumerate(session.streams[stream_at].turns):
            now_s += turn.pause_s if number else 0.0
            row: dict[str, Any] = {
                "t": now_s, "type": "s", "model": SERVED, "in": -(-turn.prompt_tokens // scale),
                "out": turn.output_tokens, "hash_ids": list(turn.hash_ids), "input_types": ["text"],
                "output_types": ["text"], "stop": "tool_use", "api_time": _answer_s(turn),
                "think_time": turn.pause_s if number else 0.0,
            }  # fmt: skip
            made.append(row)
            now_s += row["api_time"]
        return made

    main = requests(0, 0.0)
    rows: list[dict[str, Any]] = list(main)
    for at, stream in enumerate(session.streams[1:], 1):
        parent = main[stream.after]
        start_s = parent["t"] + parent["api_time"] + stream.delay_s
        inner = requests(at, start_s)
        took_s = inner[-1]["t"] + inner[-1]["api_time"] - start_s
        rows.append({
            "t": start_s, "type": "subagent", "agent_id": f"agent_{at:03}", "subagent_type": "Explore",
            "duration_ms": round(1000 * took_s), "total_tokens": sum(row["in"] + row["out"] for row in inner),
            "tool_use_count": len(inner), "status": "completed", "requests": inner, "models": [SERVED],
        })  # fmt: skip
    rows.sort(key=lambda row: row["t"])
    return {
        "id": name, "models": [SERVED], "block_size": size, "hash_id_scope": "local", "requests": rows,
        "tool_tokens": 0, "system_tokens": session.opening_tokens // scale,
    }  # fmt: skip


def _answer_s(turn: AgentTurn) -> float:
    computed = max(1, turn.prompt_tokens - turn.known_tokens)
    return computed / PREFILL_TOKENS_PER_S + turn.output_tokens * DECODE_STEP_S


def server_flags(options: Options) -> list[str]:
    """Return the flags of `warmpath serve` for every system."""
    blocks = options.kv_tokens // options.scale // BLOCK
    flags = ["--model", options.model, "--served-model-name", SERVED, "--engine", options.engine]
    sizes: dict[str, float] = {"num_blocks": blocks, "block_size": BLOCK}
    if ENGINES[options.engine].simulated:
        sizes["simulated_prefill_tokens_per_s"] = PREFILL_TOKENS_PER_S / options.scale
        sizes["simulated_decode_step_s"] = DECODE_STEP_S
    return [*flags, *set_flags(sizes), "--max-connections-per-address", "4096"]


@contextmanager
def system(name: str, options: Options) -> Iterator[str]:
    """Run two replicas behind a router; yield the URL. Raises BenchmarkError if something does not start."""
    flags = server_flags(options)
    if name in POLICIES:
        flags += [] if name == "warmpath" else ["--set=kv_pull=false"]  # copies would make up for the routing
        with instance("--replicas", str(REPLICAS), "--policy", POLICIES[name], *flags) as url:
            yield url
        return
    with ExitStack() as stack:
        urls = [stack.enter_context(instance("--replicas", "1", *flags)) for _ in range(REPLICAS)]
        if name == "smg":
            yield stack.enter_context(smg_server(options.smg, urls))
            return
        port = stack.enter_context(held_port())
        command = [sys.executable, "-m", "benchmarks.peers.ray_prefix_proxy", str(port), *urls]
        url = f"http://127.0.0.1:{port}"
        stack.enter_context(server_process(command, f"{url}/health"))
        yield url


def play(url: str, traces: Path, options: Options) -> dict[str, Any]:
    """Run the scenario against a server; return its figures. Raises BenchmarkError with the end of aiperf's output."""
    with TemporaryDirectory(prefix="warmpath-") as folder:
        command = [
            str(options.aiperf), "profile", "--scenario", SCENARIO, "--model", SERVED, "--url", url,
            "--endpoint-type", "chat", "--streaming", "--use-server-token-count", "--custom-dataset-type", "weka-trace",
            "--input-file", str(traces), "--cache-bust", "first-turn-prefix", "--concurrency", str(options.concurrency),
            "--benchmark-duration", str(options.duration_s), "--benchmark-grace-period", "60",
            "--random-seed", str(options.seed), "--tokenizer", str(resolve_model(options.model, weights=False)),
            "--artifact-dir", folder, "--ui", "none", "--no-gpu-telemetry", "--no-server-metrics",
            "--workers-max", "2", "--unsafe-override",  # else it refuses sessions from a folder
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            raise BenchmarkError(f"there is no {options.aiperf}: `make agentx` installs it") from error
        exports = list(Path(folder).rglob("profile_export_aiperf.json"))
        if done.returncode or not exports:
            raise BenchmarkError(f"aiperf ended with status {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
        return figures(json.loads(exports[0].read_text()))


def figures(export: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of aiperf's export, None where it has none, and its judgement of the submission."""
    row: dict[str, Any] = {}
    for name, (metric, statistic) in FIGURES.items():
        value = (export.get(metric) or {}).get(statistic)
        row[name] = value / 100 if value is not None and name in ("delivered", "theoretical") else value
    if row["delivered"] is not None and row["theoretical"]:
        row["of_theoretical"] = row["delivered"] / row["theoretical"]
    metadata = export.get("metadata") or {}
    return row | {
        name: metadata[name] for name in ("submission_valid", "submission_invalid_reasons") if name in metadata
    }


def virtual(name: str, sessions: Sequence[AgentSession], options: Options) -> dict[str, Any]:
    """Return a system's figures in virtual time: medians, and each run's. Raises BenchmarkError for smg."""
    if name not in VIRTUAL:
        raise BenchmarkError(f"there is no {name} in virtual time")
    rows = []
    for seed in range(options.seed, options.seed + options.virtual_runs):
        settings = ClusterSettings(
            REPLICAS, options.kv_tokens // TRACE_BLOCK_TOKENS, prefill_tokens_per_s=PREFILL_TOKENS_PER_S,
            decode_token_s=DECODE_STEP_S, seed=seed,
        )  # fmt: skip
        chosen = drawn(sessions, Options(**{**vars(options), "seed": seed}))
        cluster = Cluster(settings, VIRTUAL[name])
        rows.append(AgentX(cluster, chosen, options.concurrency, options.duration_s).run())
    medians = {figure: median(row[figure] for row in rows) for figure in rows[0]}
    return dict.fromkeys(FIGURES) | medians | {"runs": rows}


def ratios(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a sentence with the ratio of our mean TTFT to the best other one; of runs, to each one's, run by run."""
    times = {name: row["ttft_ms_mean"] for name, row in results.items() if row.get("ttft_ms_mean")}
    if "warmpath" not in times or len(times) == 1:
        return ""
    ours, sentences = results["warmpath"], []
    if "runs" not in ours:
        return f" Our mean TTFT / the best other: {times.pop('warmpath') / min(times.values()):.2f}."
    for name in times.keys() - {"warmpath"}:
        pairs = zip(ours["runs"], results[name]["runs"], strict=True)
        pairwise = [own["ttft_ms_mean"] / other["ttft_ms_mean"] for own, other in pairs]
        sentences.append(f"{name}'s {median(pairwise):.2f} ({min(pairwise):.2f} to {max(pairwise):.2f})")
    return f" Medians of {len(ours['runs'])} runs in virtual time. Our mean TTFT / {', '.join(sorted(sentences))}."


def summary(results: Mapping[str, Mapping[str, Any]], options: Options) -> str:
    """Return a sentence with each system's figures, and the ratios."""

    def figures_of(name: str, row: Mapping[str, Any]) -> str:
        if "not_measured" in row:
            return f"{name} was not measured"
        return f"{name}: " + ", ".join(f"{figure} {row[figure]:.4g}" for figure in FIGURES if row[figure] is not None)

    reasons = {reason for row in results.values() for reason in row.get("submission_invalid_reasons", ())}
    valid = f" Not a valid submission ({options.duration_s} s): {', '.join(sorted(reasons))}." if reasons else ""
    rows = "; ".join(figures_of(name, row) for name, row in results.items())
    return f"AgentX ({options.engine}, {options.concurrency} sessions): {rows}.{ratios(results)}{valid}"


@benchmark(
    __doc__,
    engine_flag("simulated", "prefixes"),
    flag("aiperf", Path(".venv-aiperf/bin/aiperf"), type=Path),
    flag("smg", Path(".venv-aiperf/bin/smg"), type=Path),
    names_flag("systems", SYSTEMS, "warmpath,round_robin,ray_prefix,smg"),
    flag("duration-s", SHORTEST_S, "of a system; the scenario's least is 900"),
    flag("concurrency", 8, "sessions that run at once"),
    flag("sessions", 24, "random sessions of the trace's 200"),
    flag("turns", 40, "maximum turns of a stream; main streams have as many"),
    flag("longest-prompt", 150_000, "trace tokens; longer sessions are skipped"),
    flag("longest-pause-s", 30.0),
    flag("scale", 8, "tokens of the trace's prompts that one token stands for"),
    flag("kv-tokens", KV_TOKENS, "a replica's pool, in the trace's tokens"),
    flag("seed", 0),
    flag("virtual-runs", 0, "runs in virtual time, from this seed on"),
    lambda parser: parser.set_defaults(speed=1.0),
    model="demo",
)
def run(options: Options) -> Findings:
    """Write the sessions, and run each system with them."""
    sessions = read_sessions()
    if options.virtual_runs:
        if not ENGINES[options.engine].simulated:
            raise BenchmarkError(f"virtual time has no {options.engine}: leave --engine out")
        results = rows_of(options.systems, lambda name: virtual(name, sessions, options))
        return Findings(results, summary(results, options))
    with TemporaryDirectory(prefix="warmpath-") as folder:
        for number, session in enumerate(drawn(sessions, options)):
            trace = weka_trace(f"session_{number:03}", session, options.scale)
            Path(folder, f"session_{number:03}.json").write_text(json.dumps(trace))

        def measure(name: str) -> dict[str, Any]:
            with system(name, options) as url:
                return play(url, Path(folder), options)

        results = rows_of(options.systems, measure)
    passed = "not_measured" not in results.get("warmpath", {})
    return Findings(results, summary(results, options), passed=passed)
