"""What a router remembers of recent requests, against naive counts."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.observe.demand import RequestTimes, WorkingSet


@given(st.lists(st.floats(0.001, 500.0), min_size=1, max_size=200))
def test_p90_is_within_a_bucket(times_s: list[float]) -> None:
    """Between the naive neighbours of the 90th percentile, 15 % around."""
    times = RequestTimes()
    for each in times_s:
        times.add(each, each / 2, 0.0)
    recent = times.recent(1.0)
    ordered = sorted(times_s)
    exact = ordered[min(int(np.ceil(0.9 * len(ordered))), len(ordered)) - 1]
    assert recent.requests == len(times_s)
    assert exact / 1.16 <= recent.p90_ttft_s <= exact * 1.16
    assert recent.mean_own_s == pytest.approx(sum(times_s) / 2 / len(times_s))
    assert recent.p90_own_s <= recent.p90_ttft_s


def test_old_requests_are_forgotten() -> None:
    """After a minute of silence there is no p90 any more, and one of now does not see the old."""
    times = RequestTimes()
    times.add(100.0, 1.0, 0.0)
    assert times.recent(65.0).requests == 0
    times.add(1.0, 1.0, 70.0)
    assert times.recent(70.0).p90_ttft_s < 2.0


def chain(rng: np.random.Generator, blocks: int) -> bytes:
    return rng.bytes(16 * blocks)


@given(st.integers(0, 2**32), st.integers(2, 30))
def test_the_working_set_counts_reused_blocks_once(seed: int, prefixes: int) -> None:
    """Within sampling's error: distinct blocks that were used three times or more."""
    rng = np.random.default_rng(seed)
    working_set, uses = WorkingSet(), Counter[bytes]()
    chains = [chain(rng, 400) for _ in range(prefixes)]
    for each in chains:
        times, blocks = int(rng.integers(1, 8)), int(rng.integers(200, 401))
        for _ in range(times):
            working_set.add(each, blocks, 10.0)
            uses.update(each[16 * n : 16 * n + 16] for n in range(blocks))
    exact = sum(count >= 3 for count in uses.values())
    assert abs(working_set.blocks(20.0) - exact) <= 6 * 8 * (exact + 64) ** 0.5
    assert working_set.blocks(20.0 + 600.0) == 0


def test_it_stays_small_and_close_whatever_comes() -> None:
    """A million blocks: at most some thousands are kept, and the estimate is within a few per cent."""
    rng = np.random.default_rng(0)
    working_set = WorkingSet()
    for number in range(100):
        each = chain(rng, 10_000)
        for _ in range(3):
            working_set.add(each, 10_000, float(number))
    assert sum(len(counts) for _, counts in working_set._slices) <= 5 * 2048
    assert working_set.blocks(100.0) == pytest.approx(1_000_000, rel=0.08)
