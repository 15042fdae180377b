"""A router's figures from recent requests, against naive counts, and the places that show them."""

from collections import Counter
from math import ceil
from random import Random
from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core import RoutingCore
from router.observe.demand import LEAST, WINDOW, RequestTimes, TtftOverhead, WorkingSet
from router.policy.policies import POLICIES
from router.protocol.request import RoutedRequest
from tests.router.cores import CHAIN, ask, core_of, decided, load


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


seconds = st.floats(0.0, 10.0)


def busy(policy: str) -> RoutingCore:
    """Return a router of four replicas: each holds five more blocks of one prompt than the last, and has more work."""
    reports = {name: load(100 * number, 1, 1) for number, name in enumerate("abcd")}
    return core_of(reports, {name: CHAIN[: 80 * number] for number, name in enumerate("abcd")}, policy=policy)


def prompt(number: int) -> RoutedRequest:
    """Return a request for that prompt; ``number`` determines its placement without a cache."""
    return ask(number, key=Random(number).randbytes(16))


@given(
    overhead_s=st.floats(0.001, 1.0),
    error=st.floats(0.5, 2.0),
    long=st.lists(st.floats(5.0, 50.0), min_size=12, max_size=40),
    slow=st.integers(0, 7),
    rng=st.randoms(use_true_random=False),
)
def test_the_overhead_is_found_beside_long_work_of_a_wrong_rate_and_a_few_slow_requests(
    overhead_s: float, error: float, long: list[float], slow: int, rng: Random
) -> None:
    """24 of up to 64 requests have little work: fewer than half of them may be late, and the rate may be off by 2x."""
    seen = [(work_s, error * work_s + overhead_s) for work_s in long]
    seen += [(0.0, overhead_s)] * (24 - slow) + [(0.0, overhead_s + 100.0)] * slow
    rng.shuffle(seen)
    learned = TtftOverhead()
    for work_s, ttft_s in seen:
        learned.add(work_s, ttft_s)
    assert learned.seconds == pytest.approx(overhead_s)


@given(st.lists(seconds, min_size=LEAST, max_size=WINDOW))
def test_of_requests_with_equal_work_the_overhead_is_the_median(beyond_s: list[float]) -> None:
    learned = TtftOverhead()
    for seen_s in beyond_s:
        learned.add(1.0, 1.0 + seen_s)
    assert learned.seconds == pytest.approx(median(beyond_s))


@given(st.lists(st.tuples(seconds, seconds), max_size=3 * WINDOW))
def test_the_overhead_is_never_negative_and_lies_among_the_differences_seen(seen: list[tuple[float, float]]) -> None:
    """A request faster than estimated never makes an estimate less than the work; too few requests change nothing."""
    learned = TtftOverhead()
    for work_s, ttft_s in seen:
        learned.add(work_s, ttft_s)
    if len(seen) < LEAST:
        assert learned.seconds == 0.0
    else:
        beyond = [max(0.0, ttft_s - work_s) for work_s, ttft_s in seen[-WINDOW:]]
        assert min(beyond) <= learned.seconds <= max(beyond)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_overhead_is_part_of_estimates_and_of_no_decision(policy: str) -> None:
    """Two routers decide alike, although one sees slow first tokens and adds that to its estimates. (docs: routing)"""
    plain, learned = busy(policy), busy(policy)
    for number in range(2 * LEAST):
        for core, beyond_s in ((plain, 0.0), (learned, 0.25)):
            decision = decided(core, prompt(number))
            core.record_delivered(decision, decision.selected_cached_tokens, decision.work_s + beyond_s)
            core.release(decision)
    for number in range(20):
        one, other = decided(plain, prompt(number)), decided(learned, prompt(number))
        assert (one.replica_id, one.reason, one.work_s) == (other.replica_id, other.reason, other.work_s)
        assert one.estimated_ttft_s == pytest.approx(one.work_s)
        assert other.estimated_ttft_s == pytest.approx(one.work_s + 0.25)
    assert learned.state()["ttft_overhead_s"] == pytest.approx(0.25)
    assert learned.demand() == plain.demand(), "more replicas would not reduce the overhead"
    said, more = (core.explain(prompt(99), [policy]) for core in (plain, learned))
    assert [one["replica_id"] for one in said["replicas"]] == [one["replica_id"] for one in more["replicas"]]
    for one, other in zip(said["replicas"], more["replicas"], strict=True):
        assert other["work_s"] == one["work_s"] == one["estimated_ttft_s"]
        assert other["estimated_ttft_s"] == pytest.approx(one["work_s"] + 0.25)
