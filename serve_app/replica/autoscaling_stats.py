"""A replica's figures for the autoscaling policy, from what its engine reports anyway."""

from __future__ import annotations

import zlib
from collections import Counter
from typing import Any

import msgspec

from router.protocol.autoscaling import ReplicaFigures
from serve_app.config.app import AppConfig
from serve_app.engine.protocol import Engine


def version_of(config: dict[str, Any]) -> int:
    """Return a number that differs between replicas that were started with different settings."""
    return zlib.crc32(msgspec.json.encode(config, order="deterministic"))


def replica_figures(engine: Engine, version: int, config: AppConfig) -> ReplicaFigures:
    """Return the figures as of now."""
    load, block_size = engine.load(), config.block_size
    sums: Counter[str] = Counter()
    for name, labels, value in engine.stats().samples:
        state = dict(labels).get("state")
        sums[f"{name}/{state}" if state else name] += value  # type: ignore[assignment]
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
        pool_tokens=pool_blocks * block_size,
        used_tokens=sums["warmpath_kv_cache_blocks/used"] * block_size,
        pinned_tokens=sums["warmpath_pinned_blocks"] * block_size,
        pin_budget_tokens=sums["warmpath_pin_budget_blocks"] * block_size,
        hands_over=config.handover,
    )
