"""One arm's run: a cluster of its own, the traffic, SIGKILLs while replicas come and go, and what is seen meanwhile.

Owns the cluster. Out: every request's result, and the replicas' states over time. Figures are made elsewhere.
"""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.end_to_end.autoscale.arms import ScalingArm
from benchmarks.end_to_end.autoscale.measured_rule import AnswerTimes
from cluster.local import LocalCluster, application
from serve_app.replay.open_loop import Result, Shot, send

TIMEOUT_S = 180.0
SAMPLE_S = 0.5
MORE_S = 1.0
"""After the last answer, for what ends with it."""
RUNNING, STARTING, STOPPING = "RUNNING", "STARTING", "STOPPING"
ALONE, TOGETHER = 1, 8
"""Clients at a time of a run to which nothing happens."""


@dataclass(slots=True)
class ScalingRun:
    """What became of one arm, in the seconds of its run. ``states``: replicas by Serve's word for their state."""

    results: dict[int, Result] = field(default_factory=dict)
    states: list[tuple[float, Counter[str]]] = field(default_factory=list)
    kills: list[float] = field(default_factory=list)


def play(
    arm: ScalingArm,
    base: Mapping[str, Any],
    shots: Sequence[Shot],
    times: Path,
    told: Callable[[], object],
    kills: Sequence[float] = (),
) -> ScalingRun:
    """Start a cluster, send everything, stop it. ``kills``: when to kill a replica, at the earliest."""
    with LocalCluster(nodes=1) as cluster:
        return asyncio.run(_Stage(arm, dict(base), cluster, times).play(shots, kills, told))


def undisturbed(
    settings: Mapping[str, Any], shots: Sequence[Shot], clients: Sequence[int], told: Callable[[], object]
) -> dict[int, set[str]]:
    """Return the answers' texts of one replica to which nothing happens, from a run with each number of clients.

    Two runs may differ: where two tokens are equally likely but for rounding, a step's other sequences decide.
    """
    texts: dict[int, set[str]] = {shot.number: set() for shot in shots}

    def take(result: Result) -> None:
        if result.answer is not None:
            texts[result.shot.number].add(result.answer.text)
        told()

    at_once = [Shot(0.0, shot.path, shot.body, number=shot.number) for shot in shots]
    with LocalCluster(nodes=1) as cluster:
        cluster.deploy(application(dict(settings)))
        for most_open in clients:
            asyncio.run(send(cluster.url, at_once, take, timeout_s=TIMEOUT_S, most_open=most_open))
    return texts


class _Stage:
    def __init__(self, arm: ScalingArm, base: dict[str, Any], cluster: LocalCluster, times: Path) -> None:
        self._application = application({**base, **arm.settings}, {"Replica": dict(arm.replicas)})
        self._cluster, self._times = cluster, AnswerTimes(times)
        self._commands = ThreadPoolExecutor(max_workers=1)  # the cluster takes one command at a time
        self._run = ScalingRun()
        self._random = Random(0)
        self._started_s = 0.0

    async def play(self, shots: Sequence[Shot], kills: Sequence[float], told: Callable[[], object]) -> ScalingRun:
        self._cluster.deploy(self._application)
        self._started_s = time.perf_counter()

        def take(result: Result) -> None:
            self._run.results[result.shot.number] = result
            if result.answer is not None:
                self._times.add(result.answer, result.ttft_s)
            told()

        watch = asyncio.create_task(self._watch(list(kills)))
        await send(self._cluster.url, shots, take, timeout_s=TIMEOUT_S)
        await asyncio.sleep(MORE_S)
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        return self._run

    async def _watch(self, kills: list[float]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            at_s = self._now_s()
            states = await loop.run_in_executor(self._commands, self._states)
            self._run.states.append((at_s, states))
            # Another one has to be there for the requests: a service without any replica is another scenario.
            if kills and at_s >= kills[0] and states[RUNNING] > 1 and (states[STARTING] or states[STOPPING]):
                kills.pop(0)
                await loop.run_in_executor(self._commands, self._kill)
            await asyncio.sleep(max(0.0, at_s + SAMPLE_S - self._now_s()))

    def _states(self) -> Counter[str]:
        told = self._cluster.status()["deployments"].get("Replica", {}).get("replica_states", {})
        # While a deploy is taken in, Serve tells of no deployment.
        return Counter(told) if told or not self._run.states else self._run.states[-1][1]

    def _kill(self) -> None:
        """Kill any replica: one that serves, starts, or leaves."""
        chosen = self._random.choice(self._cluster.processes("Replica"))
        with suppress(ProcessLookupError):
            os.kill(int(chosen["pid"]), signal.SIGKILL)
            self._run.kills.append(self._now_s())

    def _now_s(self) -> float:
        return time.perf_counter() - self._started_s
