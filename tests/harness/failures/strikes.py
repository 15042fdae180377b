"""The failures: each asks requests of a cluster, kills something under them, and says what came of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx

from benchmarks.common.prompts import text_of
from cluster.local import LocalCluster, answers, application
from serve_app.checkpoints.sources.resolve import resolve_model
from tests.harness.failures.clients import Seen

REPLICAS, INGRESSES = 3, 2
SLOTS = 8
"""Sequences that a replica runs, and as many may wait there."""
SETTINGS: dict[str, Any] = {
    "model": "demo",
    "engine": "simulated",
    "replicas": REPLICAS,
    "ingress_replicas": INGRESSES,
    "simulated_prefill_tokens_per_s": 4000,
    "simulated_decode_step_s": 0.02,
    "max_num_seqs": SLOTS,
    "max_waiting_requests": SLOTS,
}
OPTIONS = {"Replica": {"max_surge_percent": 50}, "Ingress": {"max_surge_percent": 50}}
"""A rolling update starts a new one before it stops an old one: there is room for all, and a cache to start from."""

LATE_TOKENS = 8000
"""Of a prompt that is killed before its first byte."""
UP_TIMEOUT_S = 300.0


def deployed() -> dict[str, Any]:
    """Return the application that the failures run on."""
    return application(SETTINGS, OPTIONS)


def bodies(count: int, first: int, tokens: int, max_tokens: int) -> list[dict[str, Any]]:
    """Return requests with prompts of ``tokens``, every second one greedy, the others sampled with a seed.

    ``first``: the number of the first prompt, so that no two runs share one.
    """
    model = resolve_model(SETTINGS["model"])
    return [
        {
            "model": SETTINGS["model"],
            "prompt": text_of(tokens, model, first + 1 + number),
            "max_tokens": max_tokens,
            "temperature": number % 2,
            "seed": number,
        }
        for number in range(count)
    ]


def busiest(cluster: LocalCluster) -> tuple[str, int]:
    """Return the id of the replica that runs most, and how many sequences it runs or has waiting."""
    replicas = httpx.get(f"{cluster.url}/v1/cache/state", timeout=30).json()["replicas"]
    # Of one that was killed a moment ago its last load is still told.
    here = [one for one in replicas if not one["away"]]
    busy = {one["replica_id"]: one["running_sequences"] + one["waiting_sequences"] for one in here}
    most = max(busy, key=lambda name: busy[name])
    return most, busy[most]


def kill_controller(cluster: LocalCluster) -> float:
    """Kill Serve's controller with SIGKILL; return the moment, of ``time.perf_counter``."""
    cluster.kill("controller")
    return time.perf_counter()


def kill_ingress(cluster: LocalCluster) -> float:
    """Kill one ingress with SIGKILL; return the moment."""
    cluster.kill("Ingress")
    return time.perf_counter()


def kill_busiest_replica(cluster: LocalCluster) -> float:
    """Kill the replica that runs most with SIGKILL; return the moment, of ``time.perf_counter``."""
    cluster.kill("Replica", busiest(cluster)[0])
    return time.perf_counter()


def kill_node(cluster: LocalCluster) -> float:
    """Kill the last node that has a replica, not the head; return the moment before."""
    number = max(one["node"] for one in cluster.processes("Replica"))
    before_s = time.perf_counter()
    cluster.kill_node(number)
    return before_s


def streaming(cluster: LocalCluster) -> Callable[[Sequence[Seen]], Awaitable[bool]]:
    """Say whether every stream has ten tokens, and a replica has told that it runs one."""

    async def ready(all_seen: Sequence[Seen]) -> bool:
        if not all(len(seen.token_times_s) >= 10 for seen in all_seen):
            return False
        return (await asyncio.to_thread(busiest, cluster))[1] > 0

    return ready


def computing(cluster: LocalCluster) -> Callable[[Sequence[Seen]], Awaitable[bool]]:
    """Say whether a replica has told that it works, and nobody has had a byte."""

    async def ready(all_seen: Sequence[Seen]) -> bool:
        if any(seen.token_times_s for seen in all_seen):
            raise RuntimeError("an answer began before anything was killed: ask for longer prompts")
        return (await asyncio.to_thread(busiest, cluster))[1] > 0

    return ready


def wait_until_whole(cluster: LocalCluster) -> None:
    """Wait until as many replicas and ingresses run as were asked for, HTTP answers, and routers know all replicas."""
    _until(cluster, lambda: _whole(cluster), "the cluster did not become whole again")


def _until(cluster: LocalCluster, holds: Callable[[], bool], otherwise: str) -> None:
    deadline_s = time.monotonic() + UP_TIMEOUT_S
    while not holds():
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"{otherwise}: {cluster.status()}")
        time.sleep(0.1)


def _whole(cluster: LocalCluster) -> bool:
    try:
        deployments = cluster.status()["deployments"]
        running = {name: one["replica_states"] for name, one in deployments.items()}
        if running != {"Replica": {"RUNNING": REPLICAS}, "Ingress": {"RUNNING": INGRESSES}}:
            return False
        state = httpx.get(f"{cluster.url}/v1/cache/state", timeout=30)
        alive = {one["name"] for one in cluster.processes("Replica")}
    except (httpx.HTTPError, RuntimeError):
        return False
    if state.status_code != 200 or len(alive) != REPLICAS:
        return False  # Serve's status counts a replica of a dead node as running until the controller notices.
    return alive == {
        one["replica_id"] for one in state.json()["replicas"] if not one["away"] and one["report_age_s"] is not None
    }


def seconds_until_http_answers(cluster: LocalCluster) -> float:
    """Kill HAProxy with SIGKILL; return the seconds until a new connection is answered with 200 again."""
    cluster.kill("haproxy")
    began_s = time.perf_counter()
    _until(cluster, lambda: answers(f"{cluster.url}/health"), "HTTP did not answer again")
    return time.perf_counter() - began_s


def rolling_update(cluster: LocalCluster, round_number: int) -> None:
    """Deploy with one setting changed, which restarts every replica and ingress, and wait until all are new."""
    before = names(cluster)
    cluster.deploy(application({**SETTINGS, "save_ttl_s": 1000 + round_number}, OPTIONS))
    _until(cluster, lambda: not before & names(cluster), "old replicas are still there")


def names(cluster: LocalCluster) -> set[str]:
    """Return the ids of the replicas and ingresses that run."""
    return {one["name"] for kind in ("Replica", "Ingress") for one in cluster.processes(kind)}
