"""What an engine holds at this moment, as samples: requests, blocks, bytes.

Owns the names of the gauges. Knows nothing of how they come about. Any thread may ask; figures of one moment may
differ by the step that is running.
"""

from __future__ import annotations

from collections.abc import Iterable

from serve_app.cache.prefix_cache import PrefixCache
from serve_app.engine.meters import Labels, Sample


def gauge_samples(cache: PrefixCache, labels: Labels, block_bytes: int, running: int, waiting: int) -> Iterable[Sample]:
    """Yield the pool's blocks and bytes by state, the index's size, and how many requests run and wait."""
    pool = cache.pool
    yield "warmpath_num_requests_running", labels, float(running)
    yield "warmpath_num_requests_waiting", labels, float(waiting)
    yield "warmpath_kv_cache_usage_perc", labels, pool.used_blocks / pool.total_blocks
    yield "warmpath_prefix_cache_blocks", labels, float(cache.indexed_blocks)
    yield "warmpath_prefix_cache_bytes", labels, float(cache.indexed_blocks * block_bytes)
    yield "warmpath_prefix_cache_evicted_blocks_total", labels, float(cache.evicted_blocks)
    for state, blocks in (("used", pool.used_blocks), ("cached", pool.idle_blocks), ("free", pool.free_blocks)):
        by_state = (*labels, ("state", state))
        yield "warmpath_kv_cache_blocks", by_state, float(blocks)
        yield "warmpath_kv_cache_bytes", by_state, float(blocks * block_bytes)
