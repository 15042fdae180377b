"""The state of a vLLM engine under the metric names of the built-in one."""

from __future__ import annotations

from collections.abc import Iterable

from router.protocol.samples import Labels, Sample
from serve_app.engine.vllm.frontend import ModelFacts
from serve_app.engine.vllm.load_mirror import LoadMirror


def gauge_samples(
    facts: ModelFacts, load: LoadMirror, held_blocks: int, pinned_blocks: int, labels: Labels
) -> Iterable[Sample]:
    """Yield how many requests run and wait, and the pool's blocks by state.

    ``held_blocks``: those that hold a prefix. vLLM tells which part of the pool is in use, not whether that is indexed:
    "cached" are the indexed ones as far as the rest of the pool has room for them, which is exact while nothing runs.
    ``pinned_blocks`` are in use to vLLM, and cached to whoever asks.
    """
    used = max(0, round(facts.num_blocks * load.kv_usage) - pinned_blocks)
    cached = min(held_blocks, facts.num_blocks - used)
    yield "warmpath_num_requests_running", labels, float(load.running)
    yield "warmpath_num_requests_waiting", labels, float(load.waiting)
    yield "warmpath_kv_cache_block_bytes", labels, float(facts.block_bytes)
    for state, blocks in (("used", used), ("cached", cached), ("free", facts.num_blocks - used - cached)):
        yield "warmpath_kv_cache_blocks", (*labels, ("state", state)), float(blocks)
