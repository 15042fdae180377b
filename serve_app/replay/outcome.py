"""Figures of a simulated run: times, hits, replica hours, and what a change of replicas did to hits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from serve_app.replay.cluster import Replayed
from serve_app.replay.prompts import ModelTraffic

EVENT_S = 60.0
"""Hits are compared in this time before and after a change."""


def attainment(result: Replayed, target_ttft_s: float) -> float:
    """Return the part of all requests whose first token came within the target."""
    return float(np.mean(np.nan_to_num(result.ttft_s, nan=np.inf) <= target_ttft_s)) if len(result.ttft_s) else 1.0


def figures_of(prompts: ModelTraffic, result: Replayed, target_ttft_s: float) -> dict[str, Any]:
    """Return a run's row, in seconds and tokens. ``lost``: requests without a first token."""
    times = result.ttft_s[~np.isnan(result.ttft_s)]
    p50_s, p90_s, p99_s = np.percentile(times, [50, 90, 99]).tolist() if len(times) else (np.nan,) * 3
    prompt_tokens = int(prompts.prompt_tokens.astype(np.int64).sum())
    before, after = hits_through_changes(prompts, result)
    sizes = [size for _, size in result.sizes]
    return {
        "requests": len(result.ttft_s),
        "lost": len(result.ttft_s) - len(times),
        "replica_hours": result.replica_s / 3600.0,
        "within_target": attainment(result, target_ttft_s),
        "ttft_mean_s": float(times.mean()) if len(times) else np.nan,
        "ttft_p50_s": p50_s,
        "ttft_p90_s": p90_s,
        "ttft_p99_s": p99_s,
        "hit_rate": int(result.cached_tokens.sum()) / prompt_tokens if prompt_tokens else 0.0,
        "hit_rate_before_changes": before,
        "hit_rate_after_changes": after,
        "changes": max(len(sizes) - 1, 0),
        "least_replicas": min(sizes, default=0),
        "most_replicas": max(sizes, default=0),
    }


def hits_through_changes(prompts: ModelTraffic, result: Replayed) -> tuple[float | None, float | None]:
    """Return the hit rates in the minute before and after all changes of replicas, None without any."""
    changes = np.array([at_s for at_s, _ in result.sizes[1:]])
    if not len(changes):
        return None, None
    prompt_tokens, cached = prompts.prompt_tokens.astype(np.int64), result.cached_tokens
    sums = np.concatenate(([0], np.cumsum(cached))), np.concatenate(([0], np.cumsum(prompt_tokens)))

    def rate(start_s: npt.NDArray[np.float64], end_s: npt.NDArray[np.float64]) -> float | None:
        first, last = np.searchsorted(prompts.arrival_s, start_s), np.searchsorted(prompts.arrival_s, end_s)
        tokens = int((sums[1][last] - sums[1][first]).sum())
        return int((sums[0][last] - sums[0][first]).sum()) / tokens if tokens else None

    return rate(changes - EVENT_S, changes), rate(changes, changes + EVENT_S)
