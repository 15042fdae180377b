"""Failures on a cluster of three nodes: what clients lose (bar: nothing), and how long they wait.

Each failure happens --times times under requests whose answers are compared with an undisturbed run's; simulated
engines, real Ray Serve. `python -m benchmarks failures --times 5 --json FILE`
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.common.report import names_of, parser_of, spread, write
from benchmarks.end_to_end.failures import strikes
from benchmarks.end_to_end.failures.clients import Clients, Seen
from cluster.local import LocalCluster

REQUESTS = 6
_PROMPTS_A_ROUND = 100


class Runs:
    """The failures by name; each method runs one once and returns its figures, ``outcomes`` among them."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._first = 0

    def replica(self) -> dict[str, Any]:
        """SIGKILL of a replica under streams whose prefixes nobody else holds."""
        return self._replica(strikes.bodies(REQUESTS, self._next(), strikes.COLD_TOKENS, 120), warm=False)

    def replica_alone(self) -> dict[str, Any]:
        """The same under one stream: no other that was interrupted waits for the same survivor."""
        return self._replica(strikes.bodies(1, self._next(), strikes.COLD_TOKENS, 120), warm=False)

    def replica_held(self) -> dict[str, Any]:
        """SIGKILL of a replica under streams whose prefix every replica holds."""
        return self._replica_held(REQUESTS)

    def replica_held_alone(self) -> dict[str, Any]:
        """The same under one stream."""
        return self._replica_held(1)

    def replica_first_byte(self) -> dict[str, Any]:
        """SIGKILL of a replica that computes long prompts."""
        asked = strikes.bodies(REQUESTS, self._next(), strikes.LATE_TOKENS, 10)
        return self._disturbed(asked, strikes.computing, strikes.kill_busiest_replica)

    def ingress_first_byte(self) -> dict[str, Any]:
        """SIGKILL of one of two ingresses before any answer began."""
        asked = strikes.bodies(REQUESTS, self._next(), strikes.LATE_TOKENS, 10)
        return self._disturbed(asked, strikes.computing, strikes.kill_ingress)

    def controller(self) -> dict[str, Any]:
        """SIGKILL of Serve's controller under streams."""
        before = strikes.names(self._cluster)
        asked = strikes.bodies(REQUESTS, self._next(), 100, 150)
        found = self._disturbed(asked, strikes.streaming, strikes.kill_controller)
        strikes.wait_until_whole(self._cluster)
        return {**found, "replicas_as_before": before == strikes.names(self._cluster)}

    def node(self) -> dict[str, Any]:
        """SIGKILL of a node with a replica under streams; a new node takes its place."""
        asked = strikes.bodies(REQUESTS, self._next(), 500, 150)
        found = self._disturbed(asked, strikes.streaming, strikes.kill_node)
        self._cluster.add_node()
        return found

    def rolling_update(self) -> dict[str, Any]:
        """A deploy that restarts every replica and ingress, under load."""
        asked = strikes.bodies(REQUESTS, self._next(), 200, 40)

        async def run() -> list[Seen]:
            await clients.undisturbed(asked)
            update = lambda: strikes.rolling_update(self._cluster, self._first)  # noqa: E731
            return await clients.under_load(asked, REQUESTS, update)

        clients, began_s = Clients(self._cluster.url), time.perf_counter()
        outcomes = clients.outcomes(asyncio.run(run()))
        return {"outcomes": outcomes, "update_s": time.perf_counter() - began_s}

    def haproxy(self) -> dict[str, Any]:
        """SIGKILL of HAProxy: until a new connection is answered."""
        return {"answers_after_s": strikes.seconds_until_http_answers(self._cluster)}

    def _replica_held(self, requests: int) -> dict[str, Any]:
        asked = strikes.bodies(requests, self._next(), 20, 120, shared_tokens=strikes.COLD_TOKENS)
        strikes.spread_prefix(self._cluster, asked[0])
        return self._replica(asked, warm=True)

    def _replica(self, asked: list[dict[str, Any]], *, warm: bool) -> dict[str, Any]:
        clients = Clients(self._cluster.url)

        async def run() -> tuple[list[Seen], list[tuple[Seen, float]]]:
            await clients.undisturbed(asked, salt="" if warm else "undisturbed")
            return await strikes.interrupted_streams(self._cluster, clients, asked)

        seen, broken = asyncio.run(run())
        waits = [(gap_s, clients.expected_of(one).ttft_s) for one, gap_s in broken]
        return {
            "outcomes": clients.outcomes(seen),
            "next_token_s": [gap_s for gap_s, _ in waits],
            "undisturbed_ttft_s": [ttft_s for _, ttft_s in waits],
            "next_token_over_ttft": [gap_s / ttft_s for gap_s, ttft_s in waits],
        }

    def _disturbed(
        self, asked: list[dict[str, Any]], ready: Any, strike: Callable[[LocalCluster], float]
    ) -> dict[str, Any]:
        clients = Clients(self._cluster.url)

        async def run() -> tuple[list[Seen], float]:
            await clients.undisturbed(asked)
            return await clients.disturbed(asked, ready(self._cluster), lambda: strike(self._cluster))

        seen, struck_s = asyncio.run(run())
        return {
            "outcomes": clients.outcomes(seen),
            "longest_gap_s": [max(one.longest_gap_after(struck_s) for one in seen)],
            "problems": [one.problem for one in seen if one.problem],
        }

    def _next(self) -> int:
        self._first += _PROMPTS_A_ROUND
        return self._first


FAILURES: dict[str, Callable[[Runs], dict[str, Any]]] = {
    "controller": Runs.controller,
    "replica_first_byte": Runs.replica_first_byte,
    "replica": Runs.replica,
    "replica_alone": Runs.replica_alone,
    "replica_held": Runs.replica_held,
    "replica_held_alone": Runs.replica_held_alone,
    "ingress_first_byte": Runs.ingress_first_byte,
    "node": Runs.node,
    "rolling_update": Runs.rolling_update,
    "haproxy": Runs.haproxy,
}


def main() -> None:
    """Parse flags, run, write the JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--times", type=int, default=5, help="how often each failure happens")
    parser.add_argument(
        "--failures", type=names_of(FAILURES), default=list(FAILURES), help=f"of {', '.join(FAILURES)}; default: all"
    )
    arguments = parser.parse_args()
    console = Console(stderr=True)
    with console.status("three nodes: starting"):
        cluster = LocalCluster(3)
    with cluster:
        with console.status("three replicas, two ingresses: starting"):
            cluster.deploy(strikes.deployed())
        console.print("three nodes, three replicas and two ingresses run")
        runs = run(cluster, arguments, console)
    rows = {name: summary(found) for name, found in runs.items()}
    write(arguments.json, vars(arguments), {"engine": "simulated", **rows}, sentences_of(rows))


def sentences_of(rows: dict[str, dict[str, Any]]) -> str:
    """Return what became of the answers, and how long interrupted streams paused."""
    outcomes: Counter[str] = Counter()
    for row in rows.values():
        outcomes.update(row["outcomes"])
    told = ", ".join(f"{count} {kind}" for kind, count in outcomes.items()) or "none"
    said = f"Answers through {sum(row['runs'] for row in rows.values())} failures (simulated engines): {told}."
    for name, row in rows.items():
        if pause := row.get("next_token_over_ttft"):
            said += (
                f" {name}: from the SIGKILL to the next token {pause['p50']:.2g} times the undisturbed time to the"
                f" first one in the median of {pause['count']} streams, {pause['p99']:.2g} at p99."
            )
    return said


def run(cluster: LocalCluster, arguments: argparse.Namespace, console: Console) -> dict[str, list[dict[str, Any]]]:
    """Return the figures of every run by failure."""
    found: dict[str, list[dict[str, Any]]] = {}
    runs = Runs(cluster)
    with (
        Progress(console=console) as progress,
        suppress(KeyboardInterrupt),
    ):  # what was measured before is written
        task = progress.add_task("failures", total=arguments.times * len(arguments.failures))
        for name in arguments.failures:
            for _ in range(arguments.times):
                progress.update(task, description=name)
                strikes.wait_until_whole(cluster)
                found.setdefault(name, []).append(FAILURES[name](runs))
                progress.advance(task)
    return found


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Add up outcomes, list problems, and spread every other figure over all runs."""
    outcomes: Counter[str] = Counter()
    figures: dict[str, list[float]] = {}
    problems: list[str] = []
    for one in runs:
        outcomes.update(one.get("outcomes", {}))
        problems += one.get("problems", [])
        for name, value in one.items():
            if name not in ("outcomes", "problems"):
                figures.setdefault(name, []).extend(value if isinstance(value, list) else [float(value)])
    return {
        "runs": len(runs),
        "outcomes": dict(outcomes),
        "problems": problems,
        **{name: {"count": len(values), **spread(values)} for name, values in figures.items() if values},
    }


if __name__ == "__main__":
    main()
