"""Figures of all benchmarks: percentiles, spreads, and sums of metrics."""

from collections.abc import Sequence

import numpy as np


class BenchmarkError(ValueError):
    """A benchmark cannot run; only the message is shown, without a traceback."""


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the ``percent``-th percentile (0 to 100), linearly interpolated."""
    return float(np.percentile(values, percent))


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the minimum, median, p90, p99 and maximum."""
    percentiles = {f"p{percent}": percentile(values, percent) for percent in (50, 90, 99)}
    return {"min": min(values), **percentiles, "max": max(values)}


def metric_sum(metrics: str, name: str, label: str = "") -> float:
    """Return the sum of a metric's samples with ``label`` in Prometheus' text."""
    lines = (line for line in metrics.splitlines() if line.startswith((f"{name}{{", f"{name} ")) and label in line)
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)
