"""Open-loop replay of a trace, a log or generated traffic over HTTP: TTFT, TPOT, hit rate, goodput, by tenant.

`--url` replays against any server with OpenAI's API; without it warmpath runs here with each policy in turn. A trace is
shrunk by one factor in tokens and in time, so that tokens per second stay the same.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.common.harness import Findings, Options, benchmark, engine_flag, flag, names_flag
from benchmarks.common.server import instance, new_tenants, set_flags
from benchmarks.end_to_end.replay.shots import DEFAULT_MODEL, add_source_flags, read_keys, shots_of
from router.settings import POLICY_NAMES
from serve_app.config.app import AppConfig
from serve_app.config.engine import ENGINES
from serve_app.replay.open_loop import Result, Shot, fire, summary


def replay(url: str, shots: Sequence[Shot], name: str, options: Options) -> list[Result]:
    """Send every shot at its time, with a progress bar."""
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task(name, total=len(shots))
        return asyncio.run(fire(url, shots, options.timeout_s, lambda: progress.advance(bar)))


def row_of(results: Sequence[Result], slo_s: float) -> dict[str, Any]:
    """Return the figures of one system and of its tenants."""
    row = summary(results, slo_s)
    tenants = sorted({result.shot.tenant for result in results})
    if len(tenants) > 1:
        row["tenants"] = {
            tenant: summary([result for result in results if result.shot.tenant == tenant], slo_s) for tenant in tenants
        }
    return row


def with_tenants(shots: Sequence[Shot]) -> tuple[list[Shot], list[str]]:
    """Return the shots with their tenants' keys, and the flags for an instance with these tenants."""
    names = sorted({shot.tenant for shot in shots})
    if names == ["default"]:
        return list(shots), []
    keys, tenants = new_tenants(names)
    return [replace(shot, api_key=keys[shot.tenant]) for shot in shots], [f"--set=tenants={json.dumps(tenants)}"]


def run_here(shots: Sequence[Shot], options: Options) -> dict[str, list[Result]]:
    """Replay through an instance on this machine, with each policy in turn."""
    block_tokens = AppConfig(engine=options.engine).block_size
    engine = {"block_size": block_tokens, "num_blocks": options.blocks * options.tokens_per_id // block_tokens}
    if ENGINES[options.engine].simulated:
        engine["simulated_prefill_tokens_per_s"] = options.prefill_rate
    flags = set_flags(engine) + [f"--set={pair}" for pair in options.set]
    flags += ["--model", options.model, "--engine", options.engine, "--replicas", str(options.replicas)]
    flags += ["--max-connections-per-address", "4096"]  # here all clients have the same address
    shots, tenant_flags = with_tenants(shots)
    outcomes: dict[str, list[Result]] = {}
    for policy in options.policies:
        with instance(*flags, *tenant_flags, f"--set=policy={policy}") as url:
            outcomes[policy] = replay(url, shots, policy, options)
    return outcomes


def sentence(rows: dict[str, dict[str, Any]], engine: str) -> str:
    """Return the mean TTFT and the hit rate of each system."""

    def figures(name: str, row: dict[str, Any]) -> str:
        if "ttft_mean_s" not in row:
            return f"{name} answered nothing"
        hits = row["hit_rate"]
        cached = hits if isinstance(hits, str) else f"{hits:.1%}"  # not every server reports cached tokens
        return f"{name} {row['ttft_mean_s']:.3g} s (from cache: {cached} of the prompts' tokens)"

    unreal = {name for name, traits in ENGINES.items() if traits.simulated}
    simulated = " (simulated engines)" if engine in unreal else ""
    return f"Mean TTFT{simulated}: {', '.join(figures(name, row) for name, row in rows.items())}."


@benchmark(
    __doc__,
    flag("url", help_="replay against this server instead of starting one"),
    add_source_flags,
    engine_flag("simulated", "prefixes"),
    flag("replicas", 4),
    flag("blocks", 1500, "ids that a replica's cache holds"),
    flag("prefill-rate", 5000.0, "simulated tokens/s of a replica"),
    names_flag("policies", POLICY_NAMES),
    flag("ttft-slo-s", 1.0, "maximum TTFT of a good answer"),
    flag("timeout-s", 300.0),
    flag("set", [], "more settings of warmpath", action="append", metavar="KEY=VALUE"),
)
def run(options: Options) -> Findings:
    """Replay the selected requests through every selected system."""
    keys: dict[str, str] = {}
    if options.url:
        keys = read_keys(options)
        shots = shots_of(options, keys)
        outcomes = {"url": replay(options.url.rstrip("/"), shots, options.url, options)}
    else:
        options.model = options.model or DEFAULT_MODEL
        outcomes = run_here(shots_of(options, keys), options)
    rows = {name: row_of(results, options.ttft_slo_s) for name, results in outcomes.items()}
    kind = "unknown" if options.url else options.engine
    return Findings(rows, sentence(rows, kind), {**vars(options), "api_keys": sorted(keys), "engine": kind})
