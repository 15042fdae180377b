"""Curves of a run agree with what they are made of."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.replay.cluster import Replayed
from serve_app.replay.outcome import curves_of
from serve_app.replay.prompts import ModelTraffic

TIMES = st.one_of(st.just(float("nan")), st.floats(0.001, 100.0))
REQUESTS = st.lists(st.tuples(st.floats(0.0, 1000.0), st.integers(1, 500), st.floats(0.0, 1.0), TIMES), max_size=60)


def traffic_of(arrivals: list[float], prompts: list[int]) -> ModelTraffic:
    count = len(arrivals)
    none = np.zeros(0, np.int32)
    numbers = np.zeros(count, np.int32)
    return ModelTraffic(
        16, np.array(arrivals, np.float64), np.array(prompts, np.int32), numbers + 1, numbers, none,
        np.zeros(count + 1, np.int64), [], numbers - 1, numbers,
    )  # fmt: skip


def result_of(ttft_s: list[float], cached: list[int], **more: object) -> Replayed:
    count = len(ttft_s)
    numbers = np.array(cached, np.int64)
    return Replayed(np.array(ttft_s), np.zeros(count), numbers, numbers, np.zeros(count, np.int32), **more)  # type: ignore[arg-type]


@given(REQUESTS, st.integers(1, 30), st.floats(0.0, 500.0))
def test_windows_hold_every_request_once_and_its_times(
    requests: list[tuple[float, int, float, float]], points: int, tail_s: float
) -> None:
    """Against a loop: arrivals, percentiles and hits of each window."""
    requests.sort(key=lambda request: request[0])
    arrivals, prompts = [each[0] for each in requests], [each[1] for each in requests]
    cached = [int(each[1] * each[2]) for each in requests]
    end_s = (arrivals[-1] if arrivals else 0.0) + tail_s
    curves = curves_of(
        traffic_of(arrivals, prompts), result_of([each[3] for each in requests], cached, end_s=end_s), points
    )
    assert {len(curve) for curve in curves.values()} == {points}
    edges = np.linspace(0.0, max(end_s, 1e-9), points + 1)
    places = np.clip(np.searchsorted(edges, arrivals, side="right") - 1, 0, points - 1)
    counts = np.array(curves["arrivals_per_s"]) * np.diff(edges)
    assert counts.sum() == pytest.approx(len(requests))
    for window in range(points):
        here = [number for number, place in enumerate(places) if place == window]
        assert counts[window] == pytest.approx(len(here))
        times = [requests[number][3] for number in here if not np.isnan(requests[number][3])]
        for name, part in (("ttft_p50_s", 50), ("ttft_p99_s", 99)):
            assert curves[name][window] == (pytest.approx(np.percentile(times, part)) if times else None)
        tokens = sum(prompts[number] for number in here)
        hits = sum(cached[number] for number in here)
        assert curves["hit_rate"][window] == (pytest.approx(hits / tokens) if tokens else None)


@given(st.lists(st.tuples(st.floats(0.1, 100.0), st.integers(0, 9)), max_size=8), st.integers(1, 9))
def test_cost_never_falls_and_ends_at_all_replica_hours(changes: list[tuple[float, int]], first: int) -> None:
    sizes, now_s = [(0.0, first)], 0.0
    for wait_s, size in changes:
        now_s += wait_s
        sizes.append((now_s, size))
    paid_s = 1.25 * sum(
        size * (end - at) for (at, size), (end, _) in zip(sizes, [*sizes[1:], (now_s + 9.0, 0)], strict=True)
    )
    result = result_of([], [], sizes=sizes, replica_s=paid_s, end_s=now_s + 9.0)
    cost = curves_of(traffic_of([], []), result, 50)["cost"]
    assert cost[-1] == pytest.approx(paid_s / 3600.0)
    assert all(one <= other + 1e-12 for one, other in pairwise(cost))


def test_samples_become_replicas_and_the_longest_queue() -> None:
    samples = [(0.0, 1, 0, 0), (4.0, 1, 2, 30), (6.0, 1, 2, 7), (10.0, 3, 0, 1)]
    result = result_of([], [], samples=samples, sizes=[(0.0, 1)], end_s=20.0)
    curves = curves_of(traffic_of([], []), result, 4)
    assert (
        curves["replicas"] == [1, 3, 3, 3] and curves["starting"] == [2, 0, 0, 0] and curves["queue"] == [30, 7, 1, 1]
    )
    assert curves["at_s"] == [2.5, 7.5, 12.5, 17.5] and all(type(each) is int for each in curves["queue"])


def test_a_run_of_nothing_has_curves() -> None:
    curves = curves_of(traffic_of([], []), result_of([], []), 3)
    assert curves["cost"] == [0.0] * 3 and curves["ttft_p50_s"] == [None] * 3 and curves["replicas"] == [0] * 3
