"""The application behind test_request_router: an ingress and two replicas that publish their blocks.

It runs once in each of Serve's loop modes, beside each other. Prints one line of JSON about what each saw.
"""

from __future__ import annotations

import asyncio
import json
from random import Random
from typing import Any

import ray
from ray import serve
from ray.serve._private import constants  # a module: its values are those of the process it is in
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from router.feed import FeedPublisher, FeedPublisherThread
from router.protocol.events import BlocksStored, LoadReport
from router.protocol.request import Decision, RoutedRequest
from router.serve.core_registry import core_for, decisions_for
from router.serve.request_router import deployment_key

REPLICAS, FAMILIES, BLOCKS = 2, 30, 40
MODES = {"default": "0", "throughput_optimized": "1"}
"""What RAY_SERVE_THROUGHPUT_OPTIMIZED is in the processes of an application."""


def chain_of(family: int) -> bytes:
    """The packed hashes of one family's shared prefix."""
    return Random(family).randbytes(16 * BLOCKS)


@serve.deployment(
    num_replicas=REPLICAS,
    max_ongoing_requests=400,
    request_router_config=RequestRouterConfig(
        request_router_class="router.serve.request_router.CacheAwareRouter",
        request_router_kwargs={"policy": "estimated_ttft", "block_size": 16},
    ),
)
class Holder:
    """Holds nothing at first; ``hold`` says which families it has from now on."""

    def __init__(self) -> None:
        self.replica_id = serve.get_replica_context().replica_id.unique_id
        self.feed = FeedPublisherThread(FeedPublisher(self.replica_id))
        self.feed.start()
        idle = LoadReport(0, 0, 0, 400, 400, 100_000.0, 0.01)
        self.feed.put([idle])

    def record_replica_metadata(self) -> dict[str, Any]:
        """Advertise the feed."""
        return {"feed": self.feed.endpoint.to_dict()}

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


@serve.deployment
class Ingress:
    """Sends everything and checks where it went."""

    def __init__(self, holders: DeploymentHandle) -> None:
        self.holders = holders

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
        }

    async def ask(self, core: Any, request_id: str, family: int) -> tuple[str, bool]:
        """Send one request of a family; return who served it and whether both sides saw one decision."""
        chain = chain_of(family) + Random(request_id).randbytes(16)
        route = RoutedRequest(request_id, chain, 16 * (BLOCKS + 1) + 5, chain[:16])
        served, reservation = await self.holders.generate.remote(route=route, decision=None)
        decision = self.decisions.take(request_id)
        if decision is not None:
            core.release(decision)
        return served, decision is not None and decision.reservation == reservation


def application(mode: str) -> serve.RunTarget:
    """One application whose processes are all in that mode."""
    environment = {"RAY_SERVE_THROUGHPUT_OPTIMIZED": MODES[mode]}
    options = {"num_cpus": 0, "runtime_env": {"env_vars": environment}}
    holders = Holder.options(ray_actor_options=options).bind()  # type: ignore[attr-defined]
    ingress = Ingress.options(ray_actor_options=options).bind(holders)  # type: ignore[attr-defined]
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
        outcomes = asyncio.run(ask(serve.run_many([application(mode) for mode in MODES])))
    finally:
        ray.shutdown()
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
