"""What a replica tells routers besides cache events: its load when it changes, its counters twice a second."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence

from msgspec import structs

from router.protocol.events import Event, LoadReport, StatsReport, pack_adapters
from router.protocol.samples import Sample
from serve_app.engine.protocol import Engine
from serve_app.replica.adapter_loader import ReplicaAdapters
from serve_app.replica.lifecycle.receipt import MoveMeters
from serve_app.replica.pull import Puller

STATS_INTERVAL_S = 0.5
HEARTBEAT_S = 1.0


async def report(
    engine: Engine,
    adapters: ReplicaAdapters,
    puller: Puller,
    moves: MoveMeters,
    publish: Callable[[Sequence[Event]], None],
    interval_s: float,
    refused: Callable[[], int],
) -> None:
    """Hand reports to ``publish`` until cancelled.

    Load goes out when it changed, at most every ``interval_s`` and at least every heartbeat. ``refused``: user_configs
    that could not be used.
    """
    last_load: LoadReport | None = None
    last_load_s = last_stats_s = float("-inf")
    while True:
        now_s = time.monotonic()
        events: list[Event] = []
        load = load_now(engine, adapters, puller)
        if _differs(load, last_load) or now_s - last_load_s >= HEARTBEAT_S:
            events.append(load)
            last_load, last_load_s = load, now_s
        if now_s - last_stats_s >= STATS_INTERVAL_S:
            info = ("warmpath_replica_info", (("pid", str(os.getpid())),), 1.0)
            pulls = puller.meters.samples((), puller.tokens_per_s)
            bad: Sample = ("warmpath_refused_configurations_total", (), float(refused()))
            events.append(StatsReport((*engine.stats().samples, *pulls, *moves.samples(), info, bad)))
            last_stats_s = now_s
        if events:
            publish(events)
        await asyncio.sleep(interval_s)


def load_now(engine: Engine, adapters: ReplicaAdapters, puller: Puller) -> LoadReport:
    """Return the replica's load, with what the engine does not know of it."""
    return structs.replace(
        engine.load(),
        pull_tokens_per_s=puller.tokens_per_s,
        adapters=pack_adapters(engine.adapters()),
        adapter_load_s=adapters.load_s,
    )


def _differs(load: LoadReport, last: LoadReport | None) -> bool:
    return last is None or structs.replace(load, taken_at_s=last.taken_at_s) != last
