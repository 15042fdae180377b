"""Routing decisions: latency for a 10k-token prompt, memory per block, events per second.

Each row is measured in a separate process, because of its resident memory. A failed peer is reported with the reason.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import product
from random import Random
from typing import Any

from benchmarks.common.harness import Findings, Options, apart, benchmark, flag, progress
from benchmarks.routing.workload import (
    BLOCK_SIZE,
    BLOCKS_A_MESSAGE,
    HOLDERS,
    PROMPT_TOKENS,
    RoutingWorkload,
    figures,
    messages_of,
    resident_bytes,
    serve,
)
from router.core import RoutingCore
from router.protocol.events import BlocksStored, LoadReport
from router.protocol.request import RoutedRequest

SIZES = ((8, 10_000), (64, 1_000_000), (512, 1_000_000))
MODULES = {"warmpath": "benchmarks.routing.decision_latency", "ray_prefix_tree": "benchmarks.peers.ray_prefix_tree"}
OPEN_RESERVATIONS = 32
PREFILL_TOKENS_PER_S = 5000.0
TIMEOUT_S = 900


def measure_routing(workload: RoutingWorkload) -> dict[str, float]:
    """Measure RoutingCore's events and its whole decisions: match, score, reserve."""
    before = resident_bytes()
    # Requests arrive as fast as the replicas compute them: at the speed of this loop every prefix would be hot.
    now_s = 0.0
    core = RoutingCore("benchmark", rng=Random(workload.seed), clock=lambda: now_s)
    core.update_replicas(workload.names())
    spent_s = 0.0
    for chain, holders in workload.prompts():
        messages = [BlocksStored(piece) for piece in messages_of(chain)]
        started = time.perf_counter()
        for name in holders:
            for message in messages:
                core.apply(name, (message,))
        spent_s += time.perf_counter() - started
    grown = resident_bytes() - before
    for name, report in reports(workload):
        core.apply(name, (report,))
    open_decisions, taken_s, cached = [], [], 0
    # Chains are made one by one: an ingress decides just after hashing, while the chain is in the CPU's caches.
    for number, (chain, key) in enumerate(workload.queries()):
        request = RoutedRequest(f"request-{number}", chain, PROMPT_TOKENS, key)
        now_s += PROMPT_TOKENS / (PREFILL_TOKENS_PER_S * workload.replicas)
        started = time.perf_counter()
        decision = core.decide(request)
        taken_s.append(time.perf_counter() - started)
        assert decision is not None
        cached += decision.reason == "cached"
        open_decisions.append(decision)
        if len(open_decisions) > OPEN_RESERVATIONS:
            core.release(open_decisions.pop(0))
    return {**figures(workload, taken_s, spent_s, grown), "cached_share": cached / len(taken_s)}


def reports(workload: RoutingWorkload) -> Iterator[tuple[str, LoadReport]]:
    """Yield a load report for every replica."""
    rng = Random(workload.seed + 2)
    for name in workload.names():
        waiting = rng.randrange(4)
        queued = sum(rng.randrange(8000) for _ in range(waiting))
        running = rng.randrange(32)
        yield name, LoadReport(queued, running, waiting, 64, 256, PREFILL_TOKENS_PER_S, pull_tokens_per_s=50_000.0)


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Return a sentence with the figures of the middle size."""
    replicas, blocks = SIZES[1]
    figures = [
        f"{row['system']} {row['decision_us_p50']:.0f} / {row['decision_us_p99']:.0f} us"
        if "decision_us_p50" in row
        else f"{row['system']} not measured ({row['not_measured']})"
        for row in rows
        if row["replicas"] == replicas
    ]
    return f"A decision at {replicas} replicas and {blocks:,} blocks took (p50 / p99): {', '.join(figures)}."


@benchmark(
    __doc__,
    flag("systems", list(MODULES), nargs="+", choices=list(MODULES)),
    flag("decisions", 5000),
    flag("seed", 0),
)
def run(options: Options) -> Findings:
    """Measure every system at every size, each in a process of its own."""
    rows = []
    for (replicas, blocks), system in progress(list(product(SIZES, options.systems)), "routing"):
        workload = RoutingWorkload(replicas, blocks, options.decisions, options.seed)
        figures = apart(MODULES[system], asdict(workload), timeout_s=TIMEOUT_S, quiet=True)
        rows.append({"system": system, "replicas": replicas, "blocks": blocks, **figures})
    settings = {
        "decisions": options.decisions,
        "seed": options.seed,
        "prompt_tokens": PROMPT_TOKENS,
        "block_size": BLOCK_SIZE,
        "holders_per_block": HOLDERS,
        "blocks_a_message": BLOCKS_A_MESSAGE,
    }
    return Findings({"rows": rows}, summary(rows), settings)


if __name__ == "__main__":
    serve(measure_routing)
