"""Open-loop replay of a trace, a log or generated traffic over HTTP: TTFT, TPOT, hit rate, goodput, by tenant.

`--url` replays against any server with OpenAI's API; without it warmpath runs here with each policy in turn. A trace is
shrunk by one factor in tokens and in time, so that tokens per second stay the same.
"""

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.common.open_loop import Result, Shot, fire, summary
from benchmarks.common.report import add_engine_flag, names_of, parser_of, write
from benchmarks.common.server import instance
from benchmarks.end_to_end.replay.shots import DEFAULT_MODEL, add_source_flags, read_keys, shots_of
from router.settings import POLICY_NAMES
from serve_app.config.app import AppConfig
from serve_app.config.engine import ENGINES
from serve_app.tenants import make_api_key


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--url", help="replay against this server instead of starting one")
    add_source_flags(parser)
    add_engine_flag(parser, "simulated", "prefixes")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=1500, help="ids that a replica's cache holds")
    parser.add_argument("--prefill-rate", type=float, default=5000.0, help="simulated tokens/s of a replica")
    parser.add_argument("--policies", type=names_of(POLICY_NAMES), default=",".join(POLICY_NAMES))
    parser.add_argument("--ttft-slo-s", type=float, default=1.0, help="maximum TTFT of a good answer")
    parser.add_argument("--timeout-s", type=float, default=300.0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="more settings of warmpath")
    options = parser.parse_args(arguments)
    if not options.url:
        options.model = options.model or DEFAULT_MODEL
    return options


def replay(url: str, shots: Sequence[Shot], name: str, options: argparse.Namespace) -> list[Result]:
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
    made = {tenant: make_api_key() for tenant in sorted({shot.tenant for shot in shots})}
    if list(made) == ["default"]:
        return list(shots), []
    tenants = [{"name": tenant, "key_sha256": [digest]} for tenant, (_, digest) in made.items()]
    return [replace(shot, api_key=made[shot.tenant][0]) for shot in shots], [f"--set=tenants={json.dumps(tenants)}"]


def run_here(shots: Sequence[Shot], options: argparse.Namespace) -> dict[str, list[Result]]:
    """Replay through an instance on this machine, with each policy in turn."""
    block_tokens = AppConfig(engine=options.engine).block_size
    engine = {"block_size": block_tokens, "num_blocks": options.blocks * options.tokens_per_id // block_tokens}
    if ENGINES[options.engine].simulated:
        engine["simulated_prefill_tokens_per_s"] = options.prefill_rate
    flags = [f"--set={key}={value}" for key, value in engine.items()] + [f"--set={pair}" for pair in options.set]
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


def main() -> None:
    """Replay the selected requests through every selected system."""
    options = parse()
    keys = read_keys(options) if options.url else {}
    shots = shots_of(options, keys)
    if options.url:
        outcomes = {"url": replay(options.url.rstrip("/"), shots, options.url, options)}
    else:
        outcomes = run_here(shots, options)
    rows = {name: row_of(results, options.ttft_slo_s) for name, results in outcomes.items()}
    kind = "unknown" if options.url else options.engine
    write(options.json, {**vars(options), "api_keys": sorted(keys), "engine": kind}, rows, sentence(rows, kind))


if __name__ == "__main__":
    main()
