"""How KV crosses from one replica to another: Serve handle calls that name their replica, payloads in the object store.

Calls go by reference (actor calls): what they return lies in the object store, its pages mapped, not copied.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from router.protocol.request import NoReplicaLeft
from router.serve.core_registry import running_replicas
from router.serve.request_router import deployment_key
from serve_app.cache.kv_chain import KvChain
from serve_app.cache.prefix.hot_prefixes import HashedTokens
from serve_app.config.app import AppConfig
from serve_app.engine.protocol import Engine
from serve_app.replica.pull import HolderLost, PulledPart, Puller, PullSettings, WantedPart
from serve_app.replica.pull_metrics import PullMeters

EXPORTS_AT_ONCE = 2
EXPORTS_WAITING = 32


class Peers:
    """The other replicas of this one's deployment, reached by name. ``running``: what the router beside knows of them.

    Its handle, and so that router, comes to life here: a replica that starts knows its peers by the time it can ask.
    """

    def __init__(self, app_name: str, deployment_name: str) -> None:
        self.running = running_replicas(deployment_key(app_name, deployment_name))
        handle = serve.get_deployment_handle(deployment_name, app_name)
        self._handle: DeploymentHandle = handle.options(_by_reference=True)

    async def fetch(self, holder: str, wanted: WantedPart) -> PulledPart:
        """Ask ``holder`` for a part. Raises HolderLost; cancelling it cancels the call."""
        part: PulledPart = await self.call("export_kv", holder, wanted)
        return part

    async def call(self, method: str, peer: str, *args: Any) -> Any:
        """Call a method of a peer that takes a ``target``. Raises HolderLost; cancelling it cancels the call."""
        try:
            response = self._handle.options(method_name=method).remote(*args, target=peer)
        except RayServeException as error:
            raise HolderLost(str(error)) from error
        try:
            return await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        except (RayError, RayServeException, NoReplicaLeft) as error:
            raise HolderLost(type(error).__name__) from error


class Exports:
    """What this replica hands to others: a few at once, the rest in line, and beyond that "busy"."""

    def __init__(self, engine: Engine, block_size: int, meters: PullMeters) -> None:
        self._engine = engine
        self._size = block_size
        self._meters = meters
        # Threads of their own: they wait for the engine's loop, and must not keep other work of the replica waiting.
        self._threads = ThreadPoolExecutor(EXPORTS_AT_ONCE, thread_name_prefix="kv-export")
        self._open = 0

    async def part(self, wanted: WantedPart) -> PulledPart:
        """Return the part of the prefix that is in the pool."""
        if self._open >= EXPORTS_AT_ONCE + EXPORTS_WAITING:
            self._meters.exports["busy"] += 1
            return "busy"
        self._open += 1
        try:
            chain = await asyncio.get_running_loop().run_in_executor(self._threads, self._export, wanted)
        finally:
            self._open -= 1
        self._meters.exports["gone" if chain is None else "sent"] += 1
        if chain is None:
            return "gone"
        self._meters.exported_tokens += chain.header.blocks * self._size
        return chain

    def close(self) -> None:
        """Take on nothing more; what has begun ends with the engine's loop."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _export(self, wanted: WantedPart) -> KvChain | None:
        token_ids = np.frombuffer(wanted.token_ids, dtype="<i4")
        return self._engine.export_prefix(
            HashedTokens(wanted.scope, token_ids, wanted.block_hashes),
            wanted.first,
            wanted.most_blocks,
            demote=wanted.demote,
        )


def open_peers() -> Peers:
    """Return the peers of the replica whose process this is."""
    context = serve.get_replica_context()
    return Peers(context.app_name, context.deployment)


def open_pulls(config: AppConfig, engine: Engine, peers: Peers) -> tuple[Puller, Exports]:
    """Return both sides of the pulls of the replica whose process this is."""
    settings = PullSettings(
        enabled=config.kv_pull and config.enable_prefix_caching,
        max_pulls=config.max_pulls,
        max_bytes=config.max_pull_bytes,
        min_tokens=config.min_pull_tokens,
    )
    puller = Puller(engine, peers.fetch, config.block_size, settings)
    return puller, Exports(engine, config.block_size, puller.meters)
