"""The application behind test_request_router: an ingress and three replicas that publish their blocks.

It runs once in each of Serve's loop modes, beside each other. Prints one line of JSON about what each saw.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import ray
from ray import serve
from ray.serve._private import constants  # a module: its values are those of the process it is in
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from router.feed import FeedPublisher
from router.protocol.events import BlocksStored, LoadReport
from router.protocol.request import Decision, RoutedRequest
from router.serve.core_registry import core_for, decisions_for
from router.serve.request_router import deployment_key
from serve_app.generation.aborts import Aborts
from serve_app.generation.reservation import Reservation
from serve_app.ray_compat import cancel_call
from serve_app.replica.call_tracker import CallTracker

REPLICAS, FAMILIES, BLOCKS = 3, 30, 40
BURSTS, LOOKS = 20, 300
MODES = {"default": "0", "throughput_optimized": "1"}
"""What RAY_SERVE_THROUGHPUT_OPTIMIZED is in the processes of an application."""


def chain_of(family: int) -> bytes:
    """The packed hashes of one family's shared prefix."""
    return Random(family).randbytes(16 * BLOCKS)


@serve.deployment(
    num_replicas=REPLICAS,
    max_ongoing_requests=400,
    health_check_period_s=0.5,
    request_router_config=RequestRouterConfig(
        request_router_class="router.serve.request_router.CacheAwareRouter",
        request_router_kwargs={
            "policy": "estimated_ttft",
            "block_size": 16,
            "no_replica_wait_s": 1.0,
        },
    ),
)
class Holder:
    """Holds nothing at first; ``hold`` says which families it has from now on. A file ``gate`` bars its start."""

    def __init__(self, gate: str) -> None:
        while Path(gate).exists():
            time.sleep(0.05)
        self.replica_id = serve.get_replica_context().replica_id.unique_id
        self.endless: dict[str, asyncio.Event] = {}
        self.calls = CallTracker(self.end, lambda _: True)
        self.watching = asyncio.create_task(self.calls.watch())
        self.feed = FeedPublisher(self.replica_id)
        self.feed.start()
        idle = LoadReport(0, 0, 0, 400, 400, 100_000.0, 0.01)
        self.feed.put([idle])

    def record_replica_metadata(self) -> dict[str, Any]:
        """Advertise the feed."""
        return {"feed": self.feed.endpoint.to_dict()}

    async def pid(self) -> int:
        """Say which process to kill."""
        return os.getpid()

    async def hold(self, owners: dict[str, list[int]]) -> str:
        """Publish the families that ``owners`` gives this replica."""
        families = owners.get(self.replica_id, [])
        if families:
            self.feed.put([BlocksStored(b"".join(chain_of(family) for family in families))])
        return self.replica_id

    async def generate(self, route: RoutedRequest, decision: Decision | None = None) -> tuple[str, int]:
        """Say who served the request and under which reservation."""
        await asyncio.sleep(0.01)
        return self.replica_id, -1 if decision is None else decision.reservation

    def end(self, request_id: str) -> None:
        """End a call without an end."""
        if request_id in self.endless:
            self.endless[request_id].set()

    async def generate_for_ever(self, *, route: RoutedRequest, decision: Decision | None) -> None:
        """Run until the caller leaves."""
        ended = self.endless[route.request_id] = asyncio.Event()
        self.calls.began("", route.request_id)
        try:
            await ended.wait()
        finally:
            del self.endless[route.request_id]
            self.calls.ended("", route.request_id)

    async def end_calls(self, request_ids: Sequence[str], *, target: str) -> None:
        """End what nobody waits for, as a replica does."""
        assert target == self.replica_id
        self.calls.left(request_ids)

    async def running(self) -> int:
        """Say how many calls without an end run here."""
        return len(self.endless)


@serve.deployment
class Ingress:
    """Sends everything and checks where it went."""

    def __init__(self, holders: DeploymentHandle, gate: str) -> None:
        self.holders = holders
        self.gate = Path(gate)

    async def run(self) -> dict[str, Any]:
        """Return what the test asserts."""
        app = serve.get_replica_context().app_name
        unkeyed = await asyncio.gather(*(self.holders.hold.remote({}) for _ in range(8)))
        core = core_for(deployment_key(app, "Holder"))
        self.decisions = decisions_for(deployment_key(app, "Holder"))
        names = sorted(core.replica_ids)
        owners = {name: list(range(FAMILIES))[index::REPLICAS] for index, name in enumerate(names)}
        while any(sum(core.directory.blocks_held(name).values()) == 0 for name in names):
            await self.holders.hold.remote(owners)
            await asyncio.sleep(0.02)
        owner_of = {family: name for name, families in owners.items() for family in families}
        results = await asyncio.gather(*(self.ask(core, f"r{i}", i % FAMILIES) for i in range(300)))
        nested = await asyncio.gather(*(self.ask(core, f"n{i}", i) for i in range(16)))
        return {
            "router_in_separate_loop": constants.RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP,
            "sent": len(results),
            "right": sum(served == owner_of[i % FAMILIES] for i, (served, _) in enumerate(results)),
            "same_decision": sum(same for _, same in results),
            "nested": len(nested),
            "unkeyed": len([name for name in unkeyed if name in names]),
            "faults": core.counters.faults,
            "open_reservations": core.state()["open_reservations"],
            "decision_s": core.counters.decision_s.counts,
            **await self.departures(core),
            **await self.without_replicas(core),
        }

    async def departures(self, core: Any) -> dict[str, Any]:
        """Call in bursts and leave at random moments, most of them while a replica is chosen; count what runs on."""
        rng = Random(1)
        handle = self.holders.options(method_name="generate_for_ever")

        aborts = Aborts(self.holders)

        async def listen(route: RoutedRequest) -> None:
            response, reservation = handle.remote(route=route, decision=None), Reservation(core, self.decisions, route)
            try:
                await response
            finally:
                cancel_call(response)
                reservation.leave()
                if reservation.replica_id:
                    aborts.note(reservation.replica_id, route.request_id)

        async def visit(patience_s: float) -> None:
            chain = rng.randbytes(16)
            task = asyncio.create_task(listen(RoutedRequest(chain.hex(), chain, 20, chain)))
            await asyncio.sleep(patience_s)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        for _ in range(BURSTS):
            await asyncio.gather(*(visit(rng.choice([0.01, 0.1, 0.3]) * rng.random()) for _ in range(100)))
        for _ in range(LOOKS):
            running = sum(await self.told("running"))
            if not running:
                break
            await asyncio.sleep(0.1)
        return {"left": 100 * BURSTS, "still_running": running}

    async def without_replicas(self, core: Any) -> dict[str, Any]:
        """Kill every replica, ask while none can start, and ask again once they can."""
        self.gate.touch()
        for pid in await self.told("pid"):
            os.kill(pid, signal.SIGKILL)
        await until(lambda: not core.replica_ids)
        asked = [self.ask(core, f"e{number}", number) for number in range(20)]
        refused = await asyncio.gather(*asked, return_exceptions=True)
        self.gate.unlink()
        await until(lambda: bool(core.replica_ids))
        served, _ = await self.ask(core, "after", 0)
        return {
            "refused": [type(error).__name__ for error in refused],
            "served_again": served in core.replica_ids,
            "left_behind": core.state()["open_reservations"],
        }

    async def told(self, method: str) -> list[int]:
        """What every holder says. Asked again where no answer comes: in one of some forty runs an answer was lost."""
        for _ in range(4):
            with suppress(TimeoutError):
                answers: list[int] = await self.holders.broadcast(method).results_async(timeout_s=30)
                return answers
        raise TimeoutError(f"{method}: holders do not answer")

    async def ask(self, core: Any, request_id: str, family: int) -> tuple[str, bool]:
        """Send one request of a family; return who served it and whether both sides saw one decision."""
        chain = chain_of(family) + Random(request_id).randbytes(16)
        route = RoutedRequest(request_id, chain, 16 * (BLOCKS + 1) + 5, chain[:16])
        served, reservation = await self.holders.generate.remote(route=route, decision=None)
        decision = self.decisions.take(request_id)
        if decision is not None:
            core.release(decision)
        return served, decision is not None and decision.reservation == reservation


async def until(true: Callable[[], bool]) -> None:
    """Wait for something that nobody announces."""
    while not true():  # noqa: ASYNC110
        await asyncio.sleep(0.05)


def application(mode: str, folder: str) -> serve.RunTarget:
    """One application whose processes are all in that mode."""
    environment = {"RAY_SERVE_THROUGHPUT_OPTIMIZED": MODES[mode]}
    options = {"num_cpus": 0, "runtime_env": {"env_vars": environment}}
    gate = f"{folder}/{mode}"
    holders = Holder.options(ray_actor_options=options).bind(gate)  # type: ignore[attr-defined]
    ingress = Ingress.options(ray_actor_options=options).bind(holders, gate)  # type: ignore[attr-defined]
    return serve.RunTarget(ingress, name=mode, route_prefix=None)


async def ask(handles: list[DeploymentHandle]) -> dict[str, Any]:
    """Call the ingresses from a loop, which the throughput-optimized mode needs."""
    outcomes = await asyncio.gather(*(asyncio.wait_for(handle.run.remote(), 400) for handle in handles))
    return dict(zip(MODES, outcomes, strict=True))


def main() -> None:
    """Run an application in each mode."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    try:
        serve.start(http_options={"location": "NoServer"})  # handles only: no port to share with other clusters
        with tempfile.TemporaryDirectory() as folder:
            handles = serve.run_many([application(mode, folder) for mode in MODES])
            outcomes = asyncio.run(ask(handles))
    finally:
        ray.shutdown()
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
