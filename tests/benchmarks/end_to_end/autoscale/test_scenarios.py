"""Scenarios one after the other: the load over time, arrivals that follow it, actions at their times."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.end_to_end.autoscale.scenarios import (
    SCENARIOS,
    TWO_PHASE,
    Scenario,
    actions_of,
    arrivals,
    load_at,
    timeline,
)

LOADS = st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0)), min_size=1, max_size=4)


@pytest.mark.parametrize("scenarios", [SCENARIOS, TWO_PHASE])
def test_spans_follow_each_other_and_actions_lie_in_theirs(scenarios: dict[str, Scenario]) -> None:
    spans = timeline(scenarios, 40.0)
    assert [span.name for span in spans] == list(scenarios)
    assert spans[0].start_s == 0.0
    for before, span in pairwise(spans):
        assert before.end_s == span.start_s
    actions = list(actions_of(spans, 40.0))
    assert actions == sorted(actions)
    named = {span.name: [action for _, action in span.scenario.actions] for span in spans}
    for at_s, action in actions:
        assert any(span.start_s <= at_s < span.end_s and action in named[span.name] for span in spans)


def test_the_load_is_a_line_from_start_to_end() -> None:
    spans = timeline({"up": Scenario(1.0, (0.2, 1.0)), "flat": Scenario(0.5, (0.5, 0.5))}, 10.0)
    assert [load_at(spans, at_s) for at_s in (0.0, 5.0, 10.0, 14.9, 15.0)] == pytest.approx([0.2, 0.6, 0.5, 0.5, 0.0])


@settings(max_examples=30)
@given(LOADS, st.integers(0, 100))
def test_as_many_arrive_as_the_load_says(loads: list[tuple[float, float]], seed: int) -> None:
    """Of each span, within five standard deviations of a Poisson count; in order, the same for the same seed."""
    spans = timeline({str(number): Scenario(1.0, load) for number, load in enumerate(loads)}, 200.0)
    times = list(arrivals(spans, 20.0, Random(seed)))
    assert times == sorted(times) == list(arrivals(spans, 20.0, Random(seed)))
    for span, (first, last) in zip(spans, loads, strict=True):
        expected = 200.0 * 20.0 * (first + last) / 2
        assert abs(sum(span.start_s <= at_s < span.end_s for at_s in times) - expected) <= 5 * expected**0.5 + 5
