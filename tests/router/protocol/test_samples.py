"""Smoothed figures: the newest counts most, the older ones fade."""

import pytest

from router.protocol.samples import Mean, Rate


def test_a_mean_is_its_first_value_then_moves_by_its_weight() -> None:
    mean = Mean(0.25)
    told = []
    for value in (8.0, 0.0, 0.0, 12.0):
        mean.observe(value)
        told.append(mean.value)
    assert told == [8.0, 6.0, 4.5, 6.375]


def test_a_first_guess_counts_as_a_value() -> None:
    mean = Mean(0.5, 4.0, begun=True)
    mean.observe(0.0)
    assert mean.value == 2.0


def test_a_rate_is_of_all_work_and_of_old_work_less() -> None:
    """A slow second counts more than a fast tenth of one: amounts are divided by times, not rates averaged."""
    rate = Rate()
    assert rate.per_s == 0.0
    rate = rate.then(100, 0.1).then(100, 0.9)
    assert rate.per_s == 200
    assert rate.then(0, 1.0).per_s == 100
    assert rate.then(300, 1.0, kept=0.0).per_s == 300
    for _ in range(100):
        rate = rate.then(50, 1.0, kept=0.5)
    assert rate.per_s == pytest.approx(50) and rate.seconds == pytest.approx(2)
