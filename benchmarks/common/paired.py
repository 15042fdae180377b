"""Ratios of two things measured side by side, so that what else the machine does cancels.

Owns the order of the runs and what is said of their ratios. Knows nothing of what is measured.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from benchmarks.common.report import percentile, spread

CONFIDENCE = 0.95


def ratios(measured: Sequence[float], against: Sequence[float]) -> dict[str, Any]:
    """Return the median of the paired ratios, with an interval for it, quartiles, and the two sides' medians.

    ``interval``: order statistics that hold the median with 95 % probability whatever the distribution (the extremes
    where there are too few pairs for that). ``ratio_of_minima`` compares each side's best run of what should be
    short, ``ratio_of_maxima`` of what should be large.
    """
    each = sorted(a / b for a, b in zip(measured, against, strict=True))
    low = _order_statistic(len(each))
    return {
        "ratio": percentile(each, 50),
        "interval": [each[low], each[len(each) - 1 - low]],
        "quartiles": [percentile(each, 25), percentile(each, 75)],
        "extremes": [each[0], each[-1]],
        "pairs": len(each),
        "ratio_of_minima": min(measured) / min(against),
        "ratio_of_maxima": max(measured) / max(against),
        "measured": spread(measured),
        "against": spread(against),
    }


async def alternate(
    pairs: int, measured: Callable[[int], Awaitable[float]], against: Callable[[int], Awaitable[float]]
) -> tuple[list[float], list[float]]:
    """Run both sides once a pair, each of them first in every other pair; both are given the pair's number."""
    first: list[float] = []
    second: list[float] = []
    for pair in range(pairs):
        for side, values in ((measured, first), (against, second))[:: 1 if pair % 2 == 0 else -1]:
            values.append(await side(pair))
    return first, second


def _order_statistic(count: int) -> int:
    """Return k so that the median lies between the k-th and the k-th last of ``count`` values, counted from 0.

    Source: the binomial distribution with p = 1/2 of how many values lie below the median.
    """
    below, k = 0.0, 0
    while k < count // 2:
        below += math.comb(count, k) / 2**count
        if 2 * below > 1 - CONFIDENCE:
            break
        k += 1
    return max(0, k - 1)
