"""Axes hold their values, and ticks are few and round."""

from math import log10

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.replay.charts import Scale, moment, path_of, scale_of, short, time_ticks


@given(st.lists(st.floats(0.0, 1e9), max_size=20), st.booleans(), st.booleans())
def test_an_axis_holds_its_values(values: list[float], whole: bool, may_log: bool) -> None:
    scale = scale_of(values, whole=whole, may_log=may_log)
    assert 2 <= len(scale.ticks) <= 10 and list(scale.ticks) == sorted(set(scale.ticks))
    assert all(scale.low * (1 - 1e-9) <= tick <= scale.high * (1 + 1e-9) for tick in scale.ticks)
    heights = [scale.part(value) for value in sorted(values)]
    assert heights == sorted(heights) and all(0.0 <= height <= 1.0 for height in heights)
    assert all(value <= scale.high * (1 + 1e-9) for value in values)
    assert not whole or scale.log or all(tick == int(tick) for tick in scale.ticks)


def test_values_far_apart_get_decades() -> None:
    scale = scale_of([0.012, 0.5, 80.0], may_log=True)
    assert scale.log and scale.part(1.0) - scale.part(0.1) == pytest.approx(scale.part(10.0) - scale.part(1.0))
    assert scale.low <= 0.012 and scale.high >= 80.0 and all(round(log10(tick), 9) % 1 == 0 for tick in scale.ticks)
    assert scale.part(0.0) == 0.0
    assert not scale_of([0.4, 0.5], may_log=True).log and not scale_of([0.0], may_log=True).log


@given(st.floats(0.5, 4e8))
def test_moments_on_the_axis_are_few(end_s: float) -> None:
    ticks = time_ticks(end_s)
    assert 2 <= len(ticks) <= 7 or end_s < 1.0
    assert ticks[0][0] == 0 and ticks[-1][0] <= end_s * (1 + 1e-6) and len({label for _, label in ticks}) == len(ticks)


def test_times_are_told_in_hours_and_minutes() -> None:
    assert [label for _, label in time_ticks(7200.0)] == [
        "0 min",
        "20 min",
        "40 min",
        "60 min",
        "80 min",
        "100 min",
        "120 min",
    ]
    assert [label for _, label in time_ticks(86400.0)] == ["0 h", "6 h", "12 h", "18 h", "24 h"]
    assert [moment(at_s) for at_s in (1.5, 59.9, 61.0, 3725.0)] == ["1.5 s", "1 min 00 s", "1 min 01 s", "1 h 02 min"]


def test_lines_of_counts_have_no_slopes() -> None:
    scale = Scale(0.0, 2.0, (0.0, 2.0))
    assert path_of([1.0, 3.0, 5.0], [1, 1, 2], scale, 6.0, steps=True) == "M166.7 150h0H500H833.3V0"
    assert path_of([1.0, 3.0, 5.0], [1, None, 2], scale, 6.0, steps=False) == "M166.7 150h0M833.3 0h0"


def test_long_names_are_cut() -> None:
    assert short("a" * 40) == "a" * 40 and len(short("a" * 41)) == 40
