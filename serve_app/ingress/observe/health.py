"""When an ingress is ready."""

from __future__ import annotations

import asyncio

from router.core import RoutingCore


class Health:
    """Ready once ``connecting`` is done, a replica is there, and the router knew what every replica's cache holds.

    Replicas that join later do not take it back: only a router that knew none of the caches would scatter prompts.
    """

    def __init__(self, core: RoutingCore, connecting: asyncio.Task[None]) -> None:
        self._core = core
        self._connecting = connecting
        self._synced = False

    def now(self) -> tuple[bool, int]:
        """Return whether the ingress is ready, and how many replicas it knows."""
        replicas = len(self._core.replica_ids)
        if not self._synced and self._connecting.done():
            self._synced = self._core.knows_every_cache
        return self._synced and replicas > 0, replicas
