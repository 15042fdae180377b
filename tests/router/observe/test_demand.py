"""A router's figures from recent requests, against naive counts, and the places that show them."""

from collections import Counter
from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.observe.demand import RequestTimes, WorkingSet


@given(st.lists(st.tuples(st.floats(0.0, 90.0), st.floats(0.001, 500.0)), max_size=100))
def test_times_are_those_of_the_last_minute(requests: list[tuple[float, float]]) -> None:
    times = RequestTimes()
    for at_s, ttft_s in sorted(requests):
        times.add(ttft_s, ttft_s / 2, at_s)
    recent, expected = times.recent(90.0), sorted(ttft_s for at_s, ttft_s in requests if at_s > 30.0)
    assert recent.requests == len(expected)
    assert recent.p90_ttft_s == (expected[ceil(0.9 * len(expected)) - 1] if expected else 0.0)
    assert recent.p90_own_s == recent.p90_ttft_s / 2
    assert recent.mean_own_s == pytest.approx(sum(expected) / 2 / max(len(expected), 1))


def test_of_many_requests_the_latest_stand_for_all() -> None:
    """A thousand requests per second for half a minute: all are counted, and few are kept."""
    times = RequestTimes()
    for number in range(30_000):
        times.add(number / 1000, 0.0, number / 1000)
    recent = times.recent(30.0)
    assert recent.requests == pytest.approx(60_000, rel=0.01)
    assert recent.p90_ttft_s == pytest.approx(29.6, abs=0.1)


@given(st.integers(0, 2**32), st.integers(2, 30))
def test_the_working_set_counts_reused_blocks_once(seed: int, prefixes: int) -> None:
    """The count of distinct blocks used three times or more is right within the sampling error."""
    rng = np.random.default_rng(seed)
    working_set, uses = WorkingSet(), Counter[bytes]()
    chains = [rng.bytes(16 * 400) for _ in range(prefixes)]
    for each in chains:
        times, blocks = int(rng.integers(1, 8)), int(rng.integers(200, 401))
        for _ in range(times):
            working_set.add(each, blocks, 10.0)
            uses.update(each[16 * n : 16 * n + 16] for n in range(blocks))
    exact = sum(count >= 3 for count in uses.values())
    assert abs(working_set.blocks(20.0) - exact) <= 6 * 8 * (exact + 64) ** 0.5
    assert working_set.blocks(20.0 + 600.0) == 0


def test_it_stays_small_and_close_for_any_load() -> None:
    """Of a million blocks at most some thousands are kept, and the estimate is within a few per cent."""
    rng = np.random.default_rng(0)
    working_set = WorkingSet()
    for number in range(100):
        each = rng.bytes(16 * 10_000)
        for _ in range(3):
            working_set.add(each, 10_000, float(number))
    assert sum(len(counts) for _, counts in working_set._slices) <= 5 * 2048
    assert working_set.blocks(100.0) == pytest.approx(1_000_000, rel=0.08)
