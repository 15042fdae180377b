"""Open-loop replay of a trace through real HTTP: time to first token, hit rate and goodput, per tenant too.

`--url` replays against whatever listens there. Without it every system runs here, one after the other, on the same
simulated engines: warmpath under Ray Serve with each policy, and SGLang's router over plain servers.
The trace is shrunk by one factor in tokens and in time, so that a second here is that many seconds there and tokens a
second stay what they are. `python -m benchmarks replay --json FILE [--sglang-python /path/to/env/bin/python]`
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.common.open_loop import Result, Shot, fire, summary
from benchmarks.common.plots import plot_ttft
from benchmarks.common.report import names_of, parser_of, write
from benchmarks.common.server import instance
from benchmarks.common.trace import TRACE_BLOCK_TOKENS, TraceRequest, add_trace_flags, chosen_trace
from benchmarks.end_to_end.replay_text import TraceText
from benchmarks.peers.sglang_router import sglang_router
from router.settings import POLICY_NAMES
from serve_app.checkpoints.checkpoint import resolve_model

SGLANG_ROUTER = "sglang_router"
KV_BLOCK_TOKENS = 16
_TENANT_IDS = 1
"""Requests whose prompts begin with the same ids are one tenant's."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--url", help="replay against this server instead of starting any")
    parser.add_argument("--api-key", action="append", default=[], metavar="TENANT=KEY", help="with --url; repeatable")
    parser.add_argument("--model", default="demo", help="its tokenizer makes the prompts")
    add_trace_flags(parser, requests=500)
    parser.add_argument("--speed", type=float, default=0.25, help="divides the trace's timestamps, before shrinking")
    parser.add_argument("--tokens-per-id", type=int, default=64, help="of the trace's 512: the shrinking factor")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=1500, help="ids a replica's cache holds")
    parser.add_argument("--prefill-rate", type=float, default=5000.0, help="simulated tokens/s of a replica")
    parser.add_argument("--policies", type=names_of(POLICY_NAMES), default=",".join(POLICY_NAMES))
    parser.add_argument("--sglang-python", default=os.environ.get("SGLANG_PYTHON", ""))
    parser.add_argument("--ttft-slo-s", type=float, default=1.0, help="an answer counts as good within this")
    parser.add_argument("--timeout-s", type=float, default=300.0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="more settings of warmpath")
    return parser.parse_args(arguments)


def shots_of(
    trace: Sequence[TraceRequest], text: TraceText, options: argparse.Namespace, keys: dict[str, str]
) -> list[Shot]:
    """Return what to send when. Conversations stay with one tenant."""
    shrink = TRACE_BLOCK_TOKENS / text.tokens_per_id
    tenants = list(keys)
    shots = []
    for request in trace:
        tenant = tenants[hash(request.hash_ids[:_TENANT_IDS]) % len(tenants)]
        body = {
            "model": options.model,
            "prompt": text.prompt(request),
            "max_tokens": text.output_tokens(request),
            "temperature": 0,
        }
        at_s = (request.arrival_s - trace[0].arrival_s) / options.speed / shrink
        shots.append(Shot(at_s, "/v1/completions", body, tenant, keys[tenant]))
    return shots


def replay(url: str, shots: Sequence[Shot], name: str, options: argparse.Namespace) -> list[Result]:
    """Send every shot at its time, with a progress bar."""
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task(name, total=len(shots))
        return asyncio.run(fire(url, shots, options.timeout_s, lambda: progress.advance(bar)))


def row_of(results: Sequence[Result], slo_s: float) -> dict[str, Any]:
    """Return the figures of one system, and of each tenant where there are several."""
    row = summary(results, slo_s)
    tenants = sorted({result.shot.tenant for result in results})
    if len(tenants) > 1:
        row["tenants"] = {
            tenant: summary([result for result in results if result.shot.tenant == tenant], slo_s) for tenant in tenants
        }
    return row


def main() -> None:
    """Replay the trace through every system that was asked for."""
    options = parse()
    text = TraceText(resolve_model(options.model), options.tokens_per_id)
    keys = dict(pair.split("=", 1) for pair in options.api_key) or {"default": ""}
    shots = shots_of(chosen_trace(options), text, options, keys)
    outcomes: dict[str, list[Result]] = {}
    rows: dict[str, Any] = {}
    if options.url:
        outcomes["url"] = replay(options.url.rstrip("/"), shots, options.url, options)
    else:
        engine = {
            "block_size": KV_BLOCK_TOKENS,
            "num_blocks": options.blocks * options.tokens_per_id // KV_BLOCK_TOKENS,
            "simulated_prefill_tokens_per_s": options.prefill_rate,
        }
        flags = [f"--set={key}={value}" for key, value in engine.items()] + [f"--set={pair}" for pair in options.set]
        flags += ["--model", options.model, "--engine", "simulated", "--replicas", str(options.replicas)]
        # All clients have one address here.
        flags += ["--max-connections-per-address", "4096"]
        for policy in options.policies:
            with instance(*flags, f"--set=policy={policy}") as url:
                outcomes[policy] = replay(url, shots, policy, options)
        if options.sglang_python:
            config = {"model": options.model, "engine": "simulated", **engine}
            with sglang_router(options.sglang_python, options.replicas, config) as url:
                outcomes[SGLANG_ROUTER] = replay(url, shots, SGLANG_ROUTER, options)
        else:
            rows[SGLANG_ROUTER] = {"not_measured": "no --sglang-python given; see benchmarks/peers/sglang_router.py"}
    rows |= {name: row_of(results, options.ttft_slo_s) for name, results in outcomes.items()}
    engine_kind = "unknown" if options.url else "simulated"
    write(options.json, {**vars(options), "api_key": sorted(keys), "engine": engine_kind}, rows)
    if options.json is not None:
        curves = {name: [r.ttft_s for r in results if r.answer is not None] for name, results in outcomes.items()}
        title = f"Replay of {len(shots)} requests" + ("" if options.url else ", simulated engines")
        plot_ttft(options.json.with_suffix(".png"), curves, title)


if __name__ == "__main__":
    main()
