"""Histograms in the form that Prometheus reads."""

from hypothesis import given
from hypothesis import strategies as st

from router.protocol.samples import Histogram


@given(st.lists(st.floats(-10, 10)))
def test_buckets_are_cumulative_and_bounds_belong_to_them(values: list[float]) -> None:
    histogram = Histogram((0, 1.5, 5e-6 + 2))
    for value in values:
        histogram.observe(value)
    *buckets, total, count = histogram.samples("x", (("tier", "disk"),))
    assert [labels for _, labels, _ in buckets] == [
        (("tier", "disk"), ("le", bound)) for bound in ("0.0", "1.5", "2.000005", "+Inf")
    ]
    bounds = (0.0, 1.5, 2.000005, float("inf"))
    assert [number for _, _, number in buckets] == [sum(value <= bound for value in values) for bound in bounds]
    assert total == ("x_sum", (("tier", "disk"),), sum(values, 0.0))
    assert count == ("x_count", (("tier", "disk"),), len(values))
    assert {name for name, _, _ in buckets} == {"x_bucket"}
    assert histogram.count == len(values)
