"""The constant beside the work: found whatever the prefill rate is worth, shown in every estimate, in no decision."""

from __future__ import annotations

from random import Random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core import RoutingCore
from router.observe.demand import LEAST, WINDOW, TtftOverhead
from router.policy.policies import POLICIES
from router.protocol.request import Decision
from tests.router.observe.four_replicas import core_with, request

seconds = st.floats(0.0, 10.0)


@given(
    overhead_s=st.floats(0.001, 1.0),
    error=st.floats(0.5, 2.0),
    long=st.lists(st.floats(5.0, 50.0), min_size=12, max_size=40),
    slow=st.integers(0, 7),
    rng=st.randoms(use_true_random=False),
)
def test_it_is_found_beside_long_work_of_a_wrong_rate_and_a_few_slow_requests(
    overhead_s: float, error: float, long: list[float], slow: int, rng: Random
) -> None:
    """24 of up to 64 have little work: less than half of them may come late, and the rate may be wrong by twice."""
    seen = [(work_s, error * work_s + overhead_s) for work_s in long]
    seen += [(0.0, overhead_s)] * (24 - slow) + [(0.0, overhead_s + 100.0)] * slow
    rng.shuffle(seen)
    learned = TtftOverhead()
    for work_s, ttft_s in seen:
        learned.add(work_s, ttft_s)
    assert learned.seconds == pytest.approx(overhead_s)


@given(st.lists(seconds, min_size=LEAST, max_size=WINDOW))
def test_of_requests_with_equal_work_it_is_the_median(beyond_s: list[float]) -> None:
    """Not that of the quickest of them."""
    learned = TtftOverhead()
    for seen_s in beyond_s:
        learned.add(1.0, 1.0 + seen_s)
    assert learned.seconds == pytest.approx(median(beyond_s))


@given(st.lists(st.tuples(seconds, seconds), max_size=3 * WINDOW))
def test_it_is_never_negative_and_lies_among_the_differences_seen(seen: list[tuple[float, float]]) -> None:
    """What came sooner than estimated makes no estimate shorter than the work; too few requests say nothing."""
    learned = TtftOverhead()
    for work_s, ttft_s in seen:
        learned.add(work_s, ttft_s)
    if len(seen) < LEAST:
        assert learned.seconds == 0.0
    else:
        beyond = [max(0.0, ttft_s - work_s) for work_s, ttft_s in seen[-WINDOW:]]
        assert min(beyond) <= learned.seconds <= max(beyond)


@pytest.mark.parametrize("policy", POLICIES)
def test_it_is_part_of_estimates_and_of_no_decision(policy: str) -> None:
    """Of two routers one sees slow first tokens: it decides the same, and expects that much more. (docs/routing.md)"""
    plain, learned = core_with(policy), core_with(policy)
    for number in range(2 * LEAST):
        for core, beyond_s in ((plain, 0.0), (learned, 0.25)):
            decision = decided(core, number)
            core.record_delivered(decision, decision.selected_cached_tokens, decision.work_s + beyond_s)
            core.release(decision)
    for number in range(20):
        one, other = decided(plain, number), decided(learned, number)
        assert (one.replica_id, one.reason, one.work_s) == (other.replica_id, other.reason, other.work_s)
        assert one.estimated_ttft_s == pytest.approx(one.work_s)
        assert other.estimated_ttft_s == pytest.approx(one.work_s + 0.25)
    assert learned.state()["ttft_overhead_s"] == pytest.approx(0.25)
    assert learned.demand() == plain.demand(), "more replicas would not make it less"
    said, more = (core.explain(request(99), [policy]) for core in (plain, learned))
    assert [one["replica_id"] for one in said["replicas"]] == [one["replica_id"] for one in more["replicas"]]
    for one, other in zip(said["replicas"], more["replicas"], strict=True):
        assert other["work_s"] == one["work_s"] == one["estimated_ttft_s"]
        assert other["estimated_ttft_s"] == pytest.approx(one["work_s"] + 0.25)


def decided(core: RoutingCore, number: int) -> Decision:
    decision = core.decide(request(number))
    assert decision is not None
    return decision
