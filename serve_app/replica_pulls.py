"""A replica's two sides of KV pulls, put together from its settings.

Owns the wiring of ``pull`` (what this replica fetches) and ``pull_peers`` (what it hands out). Decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ray import serve

from router.protocol.request import Decision
from serve_app.config import AppConfig
from serve_app.engine.meters import Sample
from serve_app.engine.protocol import Engine, EngineRequest
from serve_app.pull import Fetched, Puller, PullSettings, WantedPart
from serve_app.pull_peers import Exports, Peers

EXPORT_METHOD = "export_kv"
"""The replica's method that other replicas call."""


class ReplicaPulls:
    """Pulls and exports of the replica whose process this is."""

    def __init__(self, config: AppConfig, engine: Engine) -> None:
        context = serve.get_replica_context()
        settings = PullSettings(
            enabled=config.kv_pull and config.enable_prefix_caching,
            max_pulls=config.max_pulls,
            max_bytes=config.max_pull_bytes,
            min_tokens=config.min_pull_tokens,
        )
        peers = Peers(context.app_name, context.deployment, EXPORT_METHOD)
        self._replica_id = context.replica_id.unique_id
        self._puller = Puller(engine, peers.fetch, config.block_size, settings)
        self._exports = Exports(engine, config.block_size, self._puller.meters)

    @property
    def tokens_per_s(self) -> float:
        """How fast this replica pulls; 0.0 when it does not."""
        return self._puller.tokens_per_s

    def expecting(self, request: EngineRequest, decision: Decision | None) -> EngineRequest:
        """Return the request as it goes to the engine: with what it has to wait for, if it is worth waiting for."""
        holder = decision.pull_from if decision is not None else ""
        arrival = self._puller.begin(request, holder, decision.pull_tokens if decision is not None else 0)
        return request if arrival is None else replace(request, arrival=arrival)

    async def export(self, wanted: WantedPart, target: str) -> Fetched:
        """Hand out KV; "lost" where another replica was meant, for Serve sends a dead one's calls elsewhere."""
        return await self._exports.part(wanted) if target == self._replica_id else "lost"

    def samples(self) -> Iterable[Sample]:
        """Return the counters of both sides."""
        return self._puller.meters.samples((), self.tokens_per_s)

    async def stop(self) -> None:
        """End what is under way."""
        self._exports.close()
        await self._puller.stop()
