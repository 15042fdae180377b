"""Paired ratios: noise that both sides share cancels, and the interval holds the truth as often as it says."""

from __future__ import annotations

import asyncio

import numpy as np

from benchmarks.common.paired import alternate, ratios


def test_shared_noise_cancels() -> None:
    """Two sides in a ratio of 1.1, under a load that changes tenfold from pair to pair."""
    load = np.random.default_rng(0).uniform(1, 10, 30)
    found = ratios(list(1.1 * load), list(load))
    assert abs(found["ratio"] - 1.1) < 1e-9
    assert found["pairs"] == 30


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    """In 95 of 100 tries or more, with heavy tails, from six pairs on (below that it is all there is)."""
    generator = np.random.default_rng(1)
    for pairs in (6, 8, 9, 20, 80):
        held = 0
        for _ in range(1000):
            noise = np.exp(generator.standard_cauchy(pairs).clip(-5, 5))
            low, high = ratios(list(noise), [1.0] * pairs)["interval"]
            held += low <= 1.0 <= high
        assert held >= 930, (pairs, held)
    assert ratios([1.0, 2.0, 3.0], [1.0] * 3)["interval"] == [1.0, 3.0]


def test_each_side_is_first_in_every_other_pair() -> None:
    asked: list[tuple[str, int]] = []

    async def measured(pair: int) -> float:
        asked.append(("a", pair))
        return 2.0

    async def against(pair: int) -> float:
        asked.append(("b", pair))
        return 1.0

    assert asyncio.run(alternate(3, measured, against)) == ([2.0] * 3, [1.0] * 3)
    assert asked == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
