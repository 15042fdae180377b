"""Requests to one model while another one cannot start, is added, replaced and removed: failures, and their times.

The engines are simulated. The same load is measured beside nothing and, after each change, beside unrelated processes
that start until they took as much CPU as the change did: on a small machine that slows requests, whoever does it.
"""

import asyncio
import resource
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from random import Random
from typing import Any

import httpx
import psutil

from benchmarks.common.harness import Findings, Options, benchmark, flag, note
from benchmarks.common.report import percentile, spread
from cluster.local import LocalCluster, application
from serve_app.replay.client import chat_body
from serve_app.replay.open_loop import Result, Shot, fire

STEADY = "steady"
IMPORTS = [sys.executable, "-c", "import serve_app.app, serve_app.replica.replica"]
"""What a process of Serve does first."""
AT_ONCE = 2
"""Processes that a change starts at once: a replica, and an ingress with the new settings."""
NOTHING = "beside nothing"
PATIENCE_S = 300.0
CHANGES = ("cannot start", "added", "replaced", "removed")


def settings_of(*models: dict[str, Any]) -> dict[str, Any]:
    """Return settings with the steady model and others."""
    steady = {"served_model_name": STEADY}
    common = {"model": "demo", "engine": "simulated", "replicas": 1, "replica_num_cpus": 0.1, "ingress_replicas": 2}
    return {**common, "models": [steady, *models]}


class Deployment:
    """The cluster under change; each change ends when requests notice it."""

    def __init__(self, cluster: LocalCluster, client: httpx.AsyncClient) -> None:
        self.cluster, self.client = cluster, client

    async def put(self, *models: dict[str, Any], wait_s: float = 0.0) -> None:
        """Deploy the steady model and others."""
        app = application(settings_of(*models), {"Ingress": {"max_surge_percent": 50}})
        await asyncio.to_thread(self.cluster.deploy, app, wait_s)

    async def until(self, holds: Callable[[], Awaitable[bool]]) -> None:
        """Wait until a change is there, and Serve has no more to do."""
        async with asyncio.timeout(PATIENCE_S):
            while not await holds() or not await self.settled():  # noqa: ASYNC110  # other processes decide
                await asyncio.sleep(0.5)

    async def settled(self) -> bool:
        """Return whether every deployment that can start is healthy."""
        status = await asyncio.to_thread(self.cluster.status)
        healthy = {name for name, one in status["deployments"].items() if one["status"] == "HEALTHY"}
        return {"Ingress", f"Replica-{STEADY}"} <= healthy

    async def model(self, name: str) -> dict[str, Any] | None:
        """Return what ``/health`` says of a model."""
        health: dict[str, Any] = (await self.client.get(f"{self.cluster.url}/health")).json()
        model: dict[str, Any] | None = health["models"].get(name)
        return model

    async def pids(self, name: str) -> set[int]:
        """Return the processes of a model's replicas."""
        state = (await self.client.get(f"{self.cluster.url}/v1/cache/state", params={"model": name})).json()
        return {replica.get("pid", 0) for replica in state["replicas"]}

    async def change(self, name: str) -> None:
        """Make one of ``CHANGES``."""
        new = {"served_model_name": "new"}
        if name == "cannot start":
            await self.put({"served_model_name": "broken", "model": "/nowhere/at/all"})
            await self.until(lambda: self._is("broken", "down"))
        elif name == "added":
            await self.put(new)
            await self.until(lambda: self._is("new", "ok"))
        elif name == "replaced":
            before = await self.pids("new")
            await self.put({**new, "num_blocks": 4321})
            await self.until(lambda: self._replaced(before))
        else:
            await self.put()
            await self.until(self._gone)

    async def _is(self, name: str, status: str) -> bool:
        return (await self.model(name) or {}).get("status") == status

    async def _replaced(self, before: set[int]) -> bool:
        return await self._is("new", "ok") and not before & await self.pids("new")

    async def _gone(self) -> bool:
        return "Replica-new" not in (await asyncio.to_thread(self.cluster.status))["deployments"]


async def processes(cpu_s: float) -> None:
    """Start processes, ``AT_ONCE``, as a change does, until they took this much CPU."""
    begun_s = children_cpu_s()
    while children_cpu_s() - begun_s < cpu_s:
        await asyncio.gather(*(asyncio.to_thread(subprocess.run, IMPORTS, check=True) for _ in range(AT_ONCE)))


def children_cpu_s() -> float:
    """Return the CPU of all processes that this one has started and that ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def control_of(change: str) -> str:
    """Return the name of the phase that takes as much CPU as a change."""
    return f"processes with the CPU of {change!r}"


def extra_cpu_s(phase: dict[str, Any], nothing: dict[str, Any]) -> float:
    """Return the CPU of a phase over that of the requests alone in the same time."""
    return max(0.0, float(phase["busy_cpu_s"] - nothing["busy_cpu_s"] * phase["seconds"] / nothing["seconds"]))


async def measure(deployment: Deployment, options: Options, run: int) -> dict[str, Any]:
    """Return the figures of one run by phase; it ends with its change, but not before ``--seconds``."""
    figures: dict[str, Any] = {}

    async def phase(name: str, act: Coroutine[Any, Any, None]) -> None:
        await asyncio.sleep(options.pause_s)
        rng, begun_s, busy_s = Random(100 * run + len(figures)), time.monotonic(), busy()
        acting = asyncio.create_task(act)
        results: list[Result] = []
        while not acting.done() or time.monotonic() - begun_s < options.seconds:
            results += await fire(deployment.cluster.url, shots(options, rng), PATIENCE_S, lambda: None)
        await acting
        figures[name] = {**figures_of(results), "seconds": time.monotonic() - begun_s, "busy_cpu_s": busy() - busy_s}

    await phase(NOTHING, asyncio.sleep(0))
    for change in CHANGES:
        await phase(change, deployment.change(change))
        await phase(control_of(change), processes(extra_cpu_s(figures[change], figures[NOTHING])))
    return figures


def ratios(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return each change's p99 of whole answers over that beside nothing, and over its control: medians of the runs."""

    def over(change: str, other: str) -> float:
        return percentile([run[change]["answer_s"]["p99"] / run[other]["answer_s"]["p99"] for run in runs], 50)

    return {
        change: {"nothing": over(change, NOTHING), "control": over(change, control_of(change))} for change in CHANGES
    }


def shots(options: Options, rng: Random) -> list[Shot]:
    """Return the requests of five seconds."""
    planned, at_s = list[Shot](), rng.expovariate(options.requests_per_s)
    while at_s < 5.0:
        body = chat_body(STEADY, 16, f"Question {rng.random()}", "You are a clerk. " * 20)
        planned.append(Shot(at_s, "/v1/chat/completions", body))
        at_s += rng.expovariate(options.requests_per_s)
    return planned


def busy() -> float:
    """Return the seconds that the machine's cores have been busy."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait)


def figures_of(results: Sequence[Result]) -> dict[str, Any]:
    """Return the figures of a phase's requests."""
    answers = [result for result in results if result.answer is not None]
    whole_s = [result.late_s + result.answer.total_s for result in answers if result.answer is not None]
    failed = [result.reason[:200] for result in results if result.answer is None]
    return {
        "requests": len(results),
        "failed": failed,
        "ttft_s": spread([one.ttft_s for one in answers]),
        "answer_s": spread(whole_s),
    }


async def measured(cluster: LocalCluster, options: Options) -> list[dict[str, Any]]:
    """Deploy, and return the figures of all runs."""
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        deployment = Deployment(cluster, client)
        await deployment.put(wait_s=PATIENCE_S)
        await deployment.until(lambda: deployment._is(STEADY, "ok"))
        runs = []
        for run in range(options.runs):
            runs.append(await measure(deployment, options, run))
            note(str({phase: round(one["answer_s"]["p99"], 3) for phase, one in runs[-1].items()}))
        return runs


@benchmark(
    __doc__,
    flag("runs", 3),
    flag("seconds", 20.0, "the least time of a phase"),
    flag("pause-s", 5.0, "before each phase"),
    flag("requests-per-s", 12.0),
    simulated=True,
)
def run(options: Options) -> Findings:
    """Measure each change in each run."""
    with LocalCluster(1) as cluster:
        runs = asyncio.run(measured(cluster, options))
    over = ratios(runs)
    failed = sum(len(one["failed"]) for run in runs for one in run.values())
    requests = sum(one["requests"] for run in runs for one in run.values())
    changes = "; ".join(
        f"{change} {each['nothing']:.2f} ({each['control']:.2f} of processes with equal CPU)"
        for change, each in over.items()
    )
    return Findings(
        {"ratios": over, "runs": runs},
        f"{failed} of {requests} requests failed. p99 of whole answers while another model changes, over that beside "
        f"nothing, median of {len(runs)} runs: {changes}.",
    )
