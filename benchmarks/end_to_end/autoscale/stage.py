"""One arm's run: a cluster of its own, the traffic, what is done to it meanwhile, and what is seen of it each second.

Owns the cluster. Out: every request's result, samples, and when each action was begun. Figures are made elsewhere.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.common.open_loop import Result, Shot, fire
from benchmarks.end_to_end.autoscale.arms import Arm
from benchmarks.end_to_end.autoscale.scenarios import Action, Span, actions_of
from benchmarks.end_to_end.recorder import recorded
from cluster.local import LocalCluster, application

_TIMEOUT_S = 180.0
_SAMPLE_S = 1.0
_COUNTERS = {
    "warmpath_prefix_cache_queries": "prompt_tokens",
    "warmpath_prefix_cache_hits": "cached_tokens",
    "warmpath_requests_finished": "requests",
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One look. ``states``: replicas by Serve's word for their state; ``counted``: since its start, by replica."""

    at_s: float
    states: Mapping[str, int]
    counted: Mapping[str, Mapping[str, float]]


@dataclass(slots=True)
class Run:
    """What became of one arm; times in seconds of the run. ``notices``: of joins, leaves and decisions, by kind."""

    results: list[Result] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    actions: list[tuple[float, Action]] = field(default_factory=list)
    notices: dict[str, list[dict[str, Any]]] = field(default_factory=dict)


def play(
    arm: Arm,
    base: Mapping[str, Any],
    spans: Sequence[Span],
    seconds: float,
    shots: Sequence[Shot],
    progress: Callable[[], None],
    record: Path | None = None,
) -> Run:
    """Start a cluster, run it all, stop it. ``base``: settings of every arm; ``record``: a file for its events."""
    with LocalCluster(nodes=1) as cluster:
        return asyncio.run(_Stage(arm, dict(base), cluster).play(spans, seconds, shots, progress, record))


class _Stage:
    def __init__(self, arm: Arm, base: dict[str, Any], cluster: LocalCluster) -> None:
        self._arm = arm
        self._settings = {**base, **arm.settings}
        self._cluster = cluster
        # The cluster takes one command at a time.
        self._commands = ThreadPoolExecutor(max_workers=1)
        self._replicas = int(base["replicas"])
        self._run = Run()
        self._started_s = 0.0

    async def play(
        self,
        spans: Sequence[Span],
        seconds: float,
        shots: Sequence[Shot],
        progress: Callable[[], None],
        record: Path | None,
    ) -> Run:
        self._cluster.deploy(self._application())
        self._started_s = time.perf_counter()
        watch = asyncio.create_task(self._watch())
        acts = asyncio.create_task(self._act(spans, seconds))
        with recorded(self._cluster.url, record):
            self._run.results = await fire(self._cluster.url, shots, _TIMEOUT_S, progress)
            await acts
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        async with httpx.AsyncClient(timeout=30) as client:
            state = (await client.get(f"{self._cluster.url}/v1/cache/state")).json()
        self._run.notices = state.get("notices", {})
        return self._run

    def _application(self) -> dict[str, Any]:
        options = dict(self._arm.replicas)
        if not self._arm.rule:
            # Not under ``args``: what changes there restarts every replica.
            options["num_replicas"] = self._replicas
        return application(
            self._settings, {"Replica": {"max_surge_percent": 50, **options}, "Ingress": {"max_surge_percent": 100}}
        )

    async def _act(self, spans: Sequence[Span], seconds: float) -> None:
        for at_s, action in actions_of(spans, seconds):
            await asyncio.sleep(max(0.0, at_s - self._now_s()))
            if self._arm.rule and action in ("grow", "shrink", "shrink_to_one"):
                continue
            self._run.actions.append((self._now_s(), action))
            await asyncio.get_running_loop().run_in_executor(self._commands, self._do, action)

    def _do(self, action: Action) -> None:
        if action == "kill":
            self._cluster.kill("Replica")
            return
        if action == "update":
            # Any change under ``args`` starts every replica anew.
            self._settings["default_max_tokens"] = self._settings.get("default_max_tokens", 1024) + 1
        else:
            self._replicas = {"grow": self._replicas + 1, "shrink": self._replicas - 1, "shrink_to_one": 1}[action]
        self._cluster.deploy(self._application(), wait_s=0)

    async def _watch(self) -> None:
        async with httpx.AsyncClient(timeout=10) as client:
            while True:
                states = await asyncio.get_running_loop().run_in_executor(self._commands, self._states)
                at_s = self._now_s()
                try:
                    counted = _counted((await client.get(f"{self._cluster.url}/metrics")).text)
                except httpx.HTTPError:  # the ingress is being replaced
                    counted = {}
                self._run.samples.append(Sample(at_s, states, counted))
                await asyncio.sleep(max(0.0, at_s + _SAMPLE_S - self._now_s()))

    def _states(self) -> dict[str, int]:
        deployments = self._cluster.status()["deployments"]
        found: dict[str, int] = deployments.get("Replica", {}).get("replica_states", {})
        # While a deploy is being taken in, Serve tells of no deployment.
        return found or dict(self._run.samples[-1].states if self._run.samples else {})

    def _now_s(self) -> float:
        return time.perf_counter() - self._started_s


def _counted(exposition: str) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(exposition):
        name = _COUNTERS.get(family.name)
        for sample in family.samples if name is not None else ():
            of = found.setdefault(sample.labels["replica"], dict.fromkeys(_COUNTERS.values(), 0.0))
            of[name or ""] += sample.value
    return found
