"""Figures of a simulated run: times, hits, replica hours, what a change of replicas did to hits, and curves."""

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


def curves_of(traffic: ModelTraffic, result: Replayed, points: int = 200) -> dict[str, Any]:
    """Return what charts show of a run, by windows of equal length; ``at_s``: their middles.

    Times of first tokens and hits are of the requests that arrived in a window, None without any. ``replicas`` run, and
    ``starting`` do not yet, near the window's end; ``queue``: the most that waited; ``cost``: replica hours so far.
    """
    end_s = max(result.end_s, float(traffic.arrival_s[-1]) if len(traffic) else 0.0, 1e-9)
    edges = np.linspace(0.0, end_s, points + 1)
    bounds = np.searchsorted(traffic.arrival_s, edges)
    bounds[-1] = len(traffic)
    tokens = _sums(traffic.prompt_tokens, bounds)
    p50_s, p99_s = _percentiles(result.ttft_s, bounds, (0.5, 0.99))
    samples = np.array(result.samples or [(0.0, 0, 0, 0)])
    last = np.maximum(np.searchsorted(samples[:, 0], edges[1:], side="right") - 1, 0)
    first = np.minimum(np.searchsorted(samples[:, 0], edges[:-1]), len(samples) - 1)
    return {
        "at_s": ((edges[1:] + edges[:-1]) / 2).tolist(),
        "arrivals_per_s": (np.diff(bounds) / np.diff(edges)).tolist(),
        "replicas": samples[last, 1].astype(int).tolist(),
        "starting": samples[last, 2].astype(int).tolist(),
        "queue": np.maximum.reduceat(samples[:, 3], first).astype(int).tolist(),
        "ttft_p50_s": p50_s,
        "ttft_p99_s": p99_s,
        "hit_rate": _or_none(_sums(result.cached_tokens, bounds) / np.where(tokens, tokens, np.nan)),
        "cost": _replica_hours(result, edges).tolist(),
    }


def _sums(values: npt.NDArray[Any], bounds: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
    return np.diff(np.concatenate(([0], np.cumsum(values, dtype=np.int64)))[bounds])


def _or_none(values: npt.NDArray[np.float64]) -> list[float | None]:
    return [None if value != value else value for value in values.tolist()]


def _percentiles(
    ttft_s: npt.NDArray[np.float64], bounds: npt.NDArray[np.intp], parts: tuple[float, ...]
) -> list[list[float | None]]:
    """Return the percentiles of each window, as numpy has them, of the times that are not nan."""
    window = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    came = ~np.isnan(ttft_s)
    times, window = ttft_s[came], window[came]
    times = times[np.lexsort((times, window))]
    counts = np.bincount(window, minlength=len(bounds) - 1)
    starts = np.cumsum(counts) - counts
    found = []
    for part in parts:
        place = np.maximum(counts - 1, 0) * part
        low = place.astype(np.int64)
        values = np.full(len(counts), np.nan)
        some = counts > 0
        below, above = (starts + low)[some], (starts + np.minimum(low + 1, counts - 1))[some]
        values[some] = times[below] + (place - low)[some] * (times[above] - times[below])
        found.append(_or_none(values))
    return found


def _replica_hours(result: Replayed, edges: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return what is paid until each window's end.

    Replicas that leave cost until their last answer, which only the total tells: their time is spread evenly.
    """
    moments = np.array([at_s for at_s, _ in result.sizes] or [0.0])
    sizes = np.array([size for _, size in result.sizes] or [0], np.float64)
    spent_s = np.concatenate(([0.0], np.cumsum(sizes[:-1] * np.diff(moments))))
    now = np.maximum(np.searchsorted(moments, edges[1:], side="right") - 1, 0)
    until_s: npt.NDArray[np.float64] = spent_s[now] + sizes[now] * np.maximum(edges[1:] - moments[now], 0.0)
    whole_s = float(until_s[-1])
    until_s *= result.replica_s / whole_s / 3600.0 if whole_s else 0.0
    return until_s
