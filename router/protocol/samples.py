"""Metric samples for transfer.

A sample is (name, labels, number). A histogram yields samples in Prometheus's form. ``faded`` is the decay of hits, so
that frequent and recent use makes a prefix hot.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

HEAT_MEMORY_S = 600.0
"""A hit counts 1/e as much after this time."""


def faded(hits: float, used_s: float, now_s: float) -> float:
    """Return the value at ``now_s`` of hits that had the value ``hits`` at ``used_s``."""
    return hits * math.exp((used_s - now_s) / HEAT_MEMORY_S)


Labels = tuple[tuple[str, str], ...]
Sample = tuple[str, Labels, float]


WAIT_BUCKETS_S = (0.01, 0.1, 1.0, 10.0, 60.0, 300.0, 1800.0)
"""The bounds of all waits for capacity, from a step to the longest wait of a session."""


@dataclass(slots=True)
class Histogram:
    """Counts of values by upper bound, the last for larger values. ``total``: the sum of values. One thread writes."""

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.counts)

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, one or more times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def samples(self, name: str, labels: Labels = ()) -> Iterator[Sample]:
        """Yield cumulative ``_bucket`` samples with the bound as label ``le``, then ``_sum`` and ``_count``."""
        cumulative = 0
        for bound, count in zip(
            (*(repr(float(bound)) for bound in self.bounds), "+Inf"), tuple(self.counts), strict=True
        ):
            cumulative += count
            yield f"{name}_bucket", (*labels, ("le", bound)), float(cumulative)
        yield f"{name}_sum", labels, self.total
        yield f"{name}_count", labels, float(cumulative)
