"""Routing decisions: latency of a 10k-token prompt, memory a block, events a second.

One row is one process of its own, so that its resident memory is its own. A peer is a file in ``benchmarks/peers``
with ``measure_routing(RoutingWorkload) -> dict`` of the same figures; a peer that cannot be imported is named in
the results with the reason. Absolute times belong to this machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.metrics import percentile, write
from router.core import RoutingCore
from router.events import BlocksStored, LoadReport
from router.request import RoutedRequest

SIZES = ((8, 10_000), (64, 1_000_000), (512, 1_000_000))
SYSTEMS = ("warmpath",)
BLOCK_SIZE = 16
PROMPT_TOKENS = 10_007
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK_SIZE
HOLDERS = 3
BLOCKS_A_MESSAGE = 128
OPEN_RESERVATIONS = 32


@dataclass(frozen=True, slots=True)
class RoutingWorkload:
    """Prompts of 625 blocks, each held by three replicas; queries share a prefix of any depth with one of them."""

    replicas: int
    blocks: int
    decisions: int = 5000
    seed: int = 0

    def names(self) -> list[str]:
        """Return the replicas' ids."""
        return [f"replica-{number:04d}" for number in range(self.replicas)]

    def prompts(self) -> Iterator[tuple[bytes, list[str]]]:
        """Yield (packed chain, holders), made anew each time so that they weigh on nobody's memory."""
        rng = Random(self.seed)
        names = self.names()
        for _ in range(self.blocks // PROMPT_BLOCKS):
            yield rng.randbytes(16 * PROMPT_BLOCKS), rng.sample(names, HOLDERS)

    def queries(self) -> list[RoutedRequest]:
        """Return the requests to decide."""
        rng = Random(self.seed + 1)
        chains = [chain for chain, _ in self.prompts()]
        requests = []
        for number in range(self.decisions):
            shared = 16 * rng.randrange(PROMPT_BLOCKS + 1)
            chain = rng.choice(chains)[:shared] + rng.randbytes(16 * PROMPT_BLOCKS - shared)
            requests.append(RoutedRequest(f"request-{number}", chain, PROMPT_TOKENS, rng.randbytes(16)))
        return requests

    def reports(self) -> Iterator[tuple[str, LoadReport]]:
        """Yield a load for every replica."""
        rng = Random(self.seed + 2)
        for name in self.names():
            waiting = rng.randrange(4)
            queued = sum(rng.randrange(8000) for _ in range(waiting))
            running = rng.randrange(32)
            yield name, LoadReport(queued, running, waiting, 64, 256, 5000.0, 0.02, pull_tokens_per_s=50_000.0)


def measure_routing(workload: RoutingWorkload) -> dict[str, float]:
    """Measure this project's RoutingCore: events in, whole decisions (match, score, reserve) out."""
    gc.collect()
    before = resident_bytes()
    core = RoutingCore("benchmark", rng=Random(workload.seed))
    core.update_replicas(workload.names())
    blocks, spent_s = 0, 0.0
    for chain, holders in workload.prompts():
        messages = [
            BlocksStored(chain[16 * start : 16 * (start + BLOCKS_A_MESSAGE)])
            for start in range(0, PROMPT_BLOCKS, BLOCKS_A_MESSAGE)
        ]
        started = time.perf_counter()
        for name in holders:
            for message in messages:
                core.apply(name, "epoch", (message,))
        spent_s += time.perf_counter() - started
        blocks += HOLDERS * PROMPT_BLOCKS
    gc.collect()
    grown = resident_bytes() - before
    for name, report in workload.reports():
        core.apply(name, "epoch", (report,))
    queries = workload.queries()
    open_decisions = []
    taken_s = []
    for request in queries:
        started = time.perf_counter()
        decision = core.decide(request)
        taken_s.append(time.perf_counter() - started)
        assert decision is not None
        open_decisions.append(decision)
        if len(open_decisions) > OPEN_RESERVATIONS:
            core.release(open_decisions.pop(0))
    return {
        "decision_us_p50": 1e6 * percentile(taken_s, 50),
        "decision_us_p99": 1e6 * percentile(taken_s, 99),
        "bytes_per_block": grown / core.directory.num_blocks,
        "events_blocks_s": blocks / spent_s,
        "cached_share": sum(d.reason == "cached" for d in map(core.decide, queries) if d) / len(queries),
    }


def resident_bytes() -> int:
    """Return this process's resident memory (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def measure_apart(system: str, workload: RoutingWorkload) -> dict[str, Any]:
    """Measure one system in a process of its own; a failure becomes a row with the reason."""
    row = {"system": system, "replicas": workload.replicas, "blocks": workload.blocks}
    command = [sys.executable, "-m", "benchmarks.routing", "--one", json.dumps([system, asdict(workload)])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {**row, "not_measured": done.stderr.strip().splitlines()[-1]}
    return {**row, **json.loads(done.stdout)}


def measure_here(system: str, workload: RoutingWorkload) -> dict[str, float]:
    """Measure one system in this process. Raises ImportError for a peer that is not installed."""
    if system == "warmpath":
        return measure_routing(workload)
    measured: dict[str, float] = import_module(f"benchmarks.peers.{system}").measure_routing(workload)
    return measured


def main() -> None:
    """Measure every system at every size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS))
    parser.add_argument("--decisions", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        system, workload = json.loads(arguments.one)
        print(json.dumps(measure_here(system, RoutingWorkload(**workload))))
        return
    rows = [
        measure_apart(system, RoutingWorkload(replicas, blocks, arguments.decisions, arguments.seed))
        for replicas, blocks in SIZES
        for system in arguments.systems
    ]
    settings = {
        "decisions": arguments.decisions,
        "seed": arguments.seed,
        "prompt_tokens": PROMPT_TOKENS,
        "block_size": BLOCK_SIZE,
        "holders_per_block": HOLDERS,
        "blocks_a_message": BLOCKS_A_MESSAGE,
    }
    write(arguments.json, settings, rows)


if __name__ == "__main__":
    main()
