"""Metric samples for transfer.

A sample is (name, labels, number). A histogram yields samples in Prometheus's form. ``faded`` is the decay of hits, so
that frequent and recent use makes a prefix hot. ``Mean`` and ``Rate`` smooth what is measured.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

HEAT_MEMORY_S = 600.0
"""A hit counts 1/e as much after this time."""


def faded(hits: float, used_s: float, now_s: float) -> float:
    """Return the value at ``now_s`` of hits that had the value ``hits`` at ``used_s``."""
    return hits * math.exp((used_s - now_s) / HEAT_MEMORY_S)


@dataclass(slots=True)
class Mean:
    """A mean of which the newest value is the part ``weight``. ``begun``: whether ``value`` counts as an older one."""

    weight: float
    value: float = 0.0
    begun: bool = False

    def observe(self, value: float) -> None:
        """Add a value."""
        self.value += (self.weight if self.begun else 1.0) * (value - self.value)
        self.begun = True


class Rate(NamedTuple):
    """An ``amount`` in ``seconds`` of work, in which older work counts less."""

    amount: float = 0.0
    seconds: float = 0.0

    @property
    def per_s(self) -> float:
        """The amount per second, 0.0 while unknown."""
        return self.amount / self.seconds if self.seconds else 0.0

    def then(self, amount: float, seconds: float, kept: float = 1.0) -> "Rate":
        """Return the rate after more work, with the fraction ``kept`` of that until now."""
        return Rate(self.amount * kept + amount, self.seconds * kept + seconds)


Labels = tuple[tuple[str, str], ...]
Sample = tuple[str, Labels, float]


TTFT_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
_ENDS_S = (0.00015625, 0.0003125, 0.000625, 0.00125, 0.0025, *TTFT_BUCKETS_S, 160.0, 320.0, 640.0, 1280.0, 2560.0)
_STEPS = 5
TIME_CELLS_S = (
    *(low * (high / low) ** (step / _STEPS) for low, high in pairwise(_ENDS_S) for step in range(_STEPS)),
    _ENDS_S[-1],
)
"""The bounds of cells of times, of which quantiles have an error of at most 7 %; /metrics shows every fifth."""


def quantile_s(times: Mapping[int, int], share: float) -> float | None:
    """Return the time that this share stayed within, None for no time. ``times``: their numbers by ``TIME_CELLS_S``."""
    left = share * sum(times.values())
    for cell in sorted(times):
        left -= times[cell]
        if left <= 0:
            low, high = TIME_CELLS_S[max(0, cell - 1)], TIME_CELLS_S[min(cell, len(TIME_CELLS_S) - 1)]
            return float(f"{(low * high) ** 0.5:.3g}")
    return None


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
