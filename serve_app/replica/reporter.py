"""A replica's reports to routers besides cache events, and its figures for the autoscaling policy."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice

from msgspec import structs

from router.feed import FeedPublisher
from router.protocol.autoscaling import ReplicaFigures
from router.protocol.events import Event, LoadReport, StatsReport
from router.settings import MAX_ATTRIBUTES
from serve_app.config.app import AppConfig
from serve_app.engine.protocol import Engine

logger = logging.getLogger(__name__)

NEWS_PAUSE_S = 0.001
"""Prefills that start and end within this time are reported together."""
STATS_INTERVAL_S = 0.5
HEARTBEAT_S = 1.0
DIGEST_INTERVAL_S = 5.0
_LAST_PAUSE_S = 600.0


@dataclass(eq=False)
class Reporter:
    """Sends ``load`` and ``stats`` to ``feed`` while ``run`` runs."""

    load: Callable[[], LoadReport]
    stats: Callable[[], StatsReport]
    feed: FeedPublisher
    interval_s: float
    _prefills_changed: asyncio.Event = field(default_factory=asyncio.Event)

    def prefills_changed(self) -> None:
        """Tell routers at once that a prefill has arrived or ended; call it in the loop that runs ``run``."""
        self._prefills_changed.set()

    async def run(self) -> None:
        """Report until cancelled.

        Load is sent when prefills change; otherwise when it changed, at most every ``interval_s``, and at least at
        every heartbeat.
        """
        last_load: LoadReport | None = None
        last_load_s = last_stats_s = float("-inf")
        while True:
            now_s = time.monotonic()
            events: list[Event] = []
            load = self.load()
            same = last_load is not None and structs.replace(load, taken_at_s=last_load.taken_at_s) == last_load
            if not same or load.arrived or load.begun or now_s - last_load_s >= HEARTBEAT_S:
                events.append(load)
                last_load, last_load_s = load, now_s
            if now_s - last_stats_s >= STATS_INTERVAL_S:
                events.append(self.stats())
                last_stats_s = now_s
            if events:
                self.feed.put(events)
            with suppress(TimeoutError):
                async with asyncio.timeout(self.interval_s):
                    await self._prefills_changed.wait()
                await asyncio.sleep(NEWS_PAUSE_S)
                self._prefills_changed.clear()


async def tell_caches(engine: Engine, feed: FeedPublisher, interval_s: float = DIGEST_INTERVAL_S) -> None:
    """Send digests every ``interval_s``; if wrong blocks were published, send all again, at growing intervals."""
    mended, next_s, pause_s = 0, 0.0, interval_s
    while True:
        await asyncio.sleep(interval_s)
        drifts, now_s = feed.mirror_drifts, time.monotonic()
        anew = drifts != mended and now_s >= next_s
        if anew:
            logger.warning("other blocks were published than the caches hold: all held blocks are published again")
            mended, next_s, pause_s = drifts, now_s + pause_s, min(2 * pause_s, _LAST_PAUSE_S)
        await asyncio.to_thread(engine.tell_cache, anew=anew)


def attributes_of(settings: Mapping[str, str | float], labels: Mapping[str, str]) -> dict[str, str | float]:
    """Return a replica's attributes: the settings', then its node's labels, numbers as such, as many as fit."""
    attributes = dict(settings)
    for name, text in labels.items():
        if name != "ray.io/node-id":
            try:
                attributes.setdefault(name, float(text))
            except ValueError:
                attributes.setdefault(name, text)
    return dict(islice(attributes.items(), MAX_ATTRIBUTES))


def replica_figures(engine: Engine, version: int, config: AppConfig) -> ReplicaFigures:
    """Return the current figures for the autoscaling policy."""
    load = engine.load()
    sums: Counter[str] = Counter()
    for name, labels, value in engine.stats().samples:
        state = dict(labels).get("state")
        sums[f"{name}/{state}" if state else name] += value  # type: ignore[assignment]
    block_tokens = sums["warmpath_kv_cache_block_tokens"] or config.block_size
    pool_blocks = sum(sums[f"warmpath_kv_cache_blocks/{state}"] for state in ("used", "cached", "free"))
    return ReplicaFigures(
        version=version,
        arrived_tokens=sums["warmpath_prompt_tokens_computed_total"]
        + sums["warmpath_recomputed_tokens_total"]
        + load.queued_prefill_tokens,
        queued_tokens=load.queued_prefill_tokens,
        prefill_tokens_per_s=load.prefill_tokens_per_s,
        running=load.running_sequences,
        waiting=load.waiting_sequences,
        slots=load.max_running_sequences,
        pool_tokens=pool_blocks * block_tokens,
        used_tokens=sums["warmpath_kv_cache_blocks/used"] * block_tokens,
        pinned_tokens=sums["warmpath_pinned_blocks"] * block_tokens,
        pin_budget_tokens=sums["warmpath_pin_budget_blocks"] * block_tokens,
        hands_over=config.handover,
    )
