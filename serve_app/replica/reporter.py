"""What a replica tells routers besides cache events: its load when it changes, its counters twice a second.

Owns the rhythm of these reports. In: the engine, its adapters and its pulls; out: LoadReport and StatsReport events.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence

from msgspec import structs

from router.protocol.events import Event, LoadReport, StatsReport, pack_adapters
from serve_app.engine.protocol import Engine
from serve_app.replica.adapter_loader import ReplicaAdapters
from serve_app.replica.pull import Puller

STATS_INTERVAL_S = 0.5
HEARTBEAT_S = 1.0


class Reporter:
    """Load and counters of one replica. ``publish``: hands events to the feed."""

    def __init__(
        self, engine: Engine, adapters: ReplicaAdapters, puller: Puller, publish: Callable[[Sequence[Event]], None]
    ) -> None:
        self._engine = engine
        self._adapters = adapters
        self._puller = puller
        self._publish = publish

    async def run(self, interval_s: float) -> None:
        """Report until cancelled: load when it changed, at most every ``interval_s`` and at least every heartbeat."""
        last_load: LoadReport | None = None
        last_load_s = last_stats_s = float("-inf")
        while True:
            now_s = time.monotonic()
            events: list[Event] = []
            load = self._load()
            if load != last_load or now_s - last_load_s >= HEARTBEAT_S:
                events.append(load)
                last_load, last_load_s = load, now_s
            if now_s - last_stats_s >= STATS_INTERVAL_S:
                events.append(self._stats())
                last_stats_s = now_s
            if events:
                self._publish(events)
            await asyncio.sleep(interval_s)

    def _load(self) -> LoadReport:
        return structs.replace(
            self._engine.load(),
            pull_tokens_per_s=self._puller.tokens_per_s,
            adapters=pack_adapters(self._engine.adapters()),
            adapter_load_s=self._adapters.load_s,
        )

    def _stats(self) -> StatsReport:
        info = ("warmpath_replica_info", (("pid", str(os.getpid())),), 1.0)
        pulls = self._puller.meters.samples((), self._puller.tokens_per_s)
        return StatsReport((*self._engine.stats().samples, *pulls, info))
