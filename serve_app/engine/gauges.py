"""What an engine holds at this moment, as samples: requests, blocks, bytes.

Owns the names of the gauges. Knows nothing of how they come about. Any thread may ask; figures of one moment may
differ by the step that is running.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from serve_app.cache.prefix_cache import PrefixCache
from serve_app.engine.meters import TENANT_LABELS, Labels, Sample


def gauge_samples(cache: PrefixCache, labels: Labels, block_bytes: int, running: int, waiting: int) -> Iterable[Sample]:
    """Yield the pool's blocks and bytes by state, the index's size, and how many requests run and wait."""
    pool = cache.pool
    # A block that only a pin holds is in use to the pool, and cached to whoever asks.
    kept = min(cache.pinned_idle_blocks(), pool.used_blocks)
    yield "warmpath_num_requests_running", labels, float(running)
    yield "warmpath_num_requests_waiting", labels, float(waiting)
    yield "warmpath_kv_cache_usage_perc", labels, (pool.used_blocks - kept) / pool.total_blocks
    yield "warmpath_prefix_cache_blocks", labels, float(cache.indexed_blocks)
    yield "warmpath_prefix_cache_bytes", labels, float(cache.indexed_blocks * block_bytes)
    pins = cache.pins
    yield "warmpath_pinned_prefixes", labels, float(len(pins))
    yield "warmpath_pinned_blocks", labels, float(pins.blocks)
    yield "warmpath_pinned_bytes", labels, float(pins.blocks * block_bytes)
    yield "warmpath_pin_budget_bytes", labels, float(pins.budget_blocks * block_bytes)
    yield "warmpath_pins_recalled_total", labels, float(cache.recalled_pins)
    for tenant, blocks in bounded(pins.holdings()).items():
        yield "warmpath_tenant_pinned_blocks", (*labels, ("tenant", tenant)), float(blocks)
    for tenant, blocks in bounded(cache.quota.holdings()).items():
        by_tenant = (*labels, ("tenant", tenant))
        yield "warmpath_tenant_kv_cache_blocks", by_tenant, float(blocks)
        yield "warmpath_tenant_kv_cache_bytes", by_tenant, float(blocks * block_bytes)
    yield "warmpath_prefix_cache_evicted_blocks_total", labels, float(cache.evicted_blocks)
    states = (("used", pool.used_blocks - kept), ("cached", pool.idle_blocks + kept), ("free", pool.free_blocks))
    for state, blocks in states:
        by_state = (*labels, ("state", state))
        yield "warmpath_kv_cache_blocks", by_state, float(blocks)
        yield "warmpath_kv_cache_bytes", by_state, float(blocks * block_bytes)


def bounded(by_tenant: Mapping[str, int]) -> dict[str, int]:
    """Return the largest ``TENANT_LABELS`` figures by tenant, and the sum of the rest as "other"."""
    if len(by_tenant) <= TENANT_LABELS:
        return dict(by_tenant)
    ordered = sorted(by_tenant.items(), key=lambda item: (-item[1], item[0]))
    shown = dict(ordered[:TENANT_LABELS])
    shown["other"] = shown.get("other", 0) + sum(blocks for _, blocks in ordered[TENANT_LABELS:])
    return shown
