"""Routing decisions: latency for a 10k-token prompt, memory per block, events per second.

Each row is measured in a separate process, because of its resident memory. A failed peer is reported with the reason.
``--shadow``: the time that each policy takes as a shadow, instead.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
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
from router.protocol.request import Decision, RoutedRequest
from router.settings import POLICY_NAMES, RouterSettings

SHADOW_SIZES = ((4, 10_000), (16, 100_000), (64, 1_000_000))
SIZES = ((8, 10_000), (64, 1_000_000), (512, 1_000_000))
MODULES = {"warmpath": "benchmarks.routing.decision_latency", "ray_prefix_tree": "benchmarks.peers.ray_prefix_tree"}
OPEN_RESERVATIONS = 32
PREFILL_TOKENS_PER_S = 5000.0
TIMEOUT_S = 900


def measure_routing(workload: RoutingWorkload) -> dict[str, float]:
    """Measure RoutingCore's events and its whole decisions: match, score, reserve."""
    before = resident_bytes()
    now_s = 0.0
    core, spent_s = filled_core(workload, lambda: now_s)
    grown = resident_bytes() - before
    for name, report in reports(workload):
        core.apply(name, (report,))
    open_decisions, taken_s, cached = [], [], 0
    # Chains are made one by one: an ingress decides just after hashing, while the chain is in the CPU's caches.
    for number, (chain, key) in enumerate(workload.queries()):
        request = RoutedRequest(f"request-{number}", chain, PROMPT_TOKENS, key)
        # Requests arrive as fast as the replicas compute them: at the speed of this loop every prefix would be hot.
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


def filled_core(
    workload: RoutingWorkload, clock: Callable[[], float], settings: RouterSettings | None = None
) -> tuple[RoutingCore, float]:
    """Return a core that knows the workload's blocks, and the seconds that their events took."""
    core = RoutingCore("benchmark", settings, rng=Random(workload.seed), clock=clock)
    core.update_replicas(workload.names())
    spent_s = 0.0
    for chain, holders in workload.prompts():
        messages = [BlocksStored(piece) for piece in messages_of(chain)]
        started = time.perf_counter()
        for name in holders:
            for message in messages:
                core.apply(name, (message,))
        spent_s += time.perf_counter() - started
    return core, spent_s


def measure_shadow(workload: RoutingWorkload, policy: str) -> dict[str, float]:
    """Measure the CPU that a shadow adds to a decision, on average: two equal cores decide, one of them with it."""
    shadowed, _ = filled_core(workload, time.perf_counter, RouterSettings(shadow_policy=policy))
    alone, _ = filled_core(workload, time.perf_counter)
    open_decisions: dict[RoutingCore, list[Decision]] = {shadowed: [], alone: []}
    spent_ns = {shadowed: 0, alone: 0}
    for core in spent_ns:
        for name, report in reports(workload):
            core.apply(name, (report,))
    gc.collect()
    gc.freeze()  # a look through both directories would be charged to one decision
    for number, (chain, key) in enumerate(workload.queries()):
        # An id as an ingress makes it: which requests a slow shadow decides about depends on it.
        request = RoutedRequest(f"cmpl-{number:032x}", chain, PROMPT_TOKENS, key)
        for core in (shadowed, alone) if number % 2 else (alone, shadowed):
            started_ns = time.thread_time_ns()
            decision = core.decide(request)
            spent_ns[core] += time.thread_time_ns() - started_ns
            assert decision is not None
            open_decisions[core].append(decision)
            if len(open_decisions[core]) > OPEN_RESERVATIONS:
                core.release(open_decisions[core].pop(0))
    compared = shadowed.counters.shadows[shadowed.settings.policy, policy].decisions
    return {
        "decision_us": spent_ns[alone] / workload.decisions / 1e3,
        "shadow_us": (spent_ns[shadowed] - spent_ns[alone]) / workload.decisions / 1e3,
        "compared_share": compared / workload.decisions,
    }


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
    flag("shadow", False, "measure what each policy takes as a shadow_policy"),
)
def run(options: Options) -> Findings:
    """Measure every system at every size, each in a process of its own; or every shadow."""
    if options.shadow:
        return run_shadows(options)
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


def run_shadows(options: Options) -> Findings:
    """Measure every policy as a shadow beside the default one, at every size."""
    rows = []
    for (replicas, blocks), policy in progress(list(product(SHADOW_SIZES, POLICY_NAMES)), "routing --shadow"):
        workload = RoutingWorkload(replicas, blocks, options.decisions, options.seed)
        rows.append({"shadow": policy, "replicas": replicas, "blocks": blocks, **measure_shadow(workload, policy)})
    worst = max(rows, key=lambda row: float(row["shadow_us"]))
    said = f"{worst['shadow']} at {worst['replicas']} replicas: {worst['shadow_us']:.1f} us a request"
    least = min(rows, key=lambda row: float(row["compared_share"]))
    part = f"{least['shadow']} at {least['replicas']} decided about {least['compared_share']:.0%} of them"
    return Findings({"rows": rows}, f"The slowest shadow was {said}; {part}.", {"decisions": options.decisions})


if __name__ == "__main__":
    serve(measure_routing)
