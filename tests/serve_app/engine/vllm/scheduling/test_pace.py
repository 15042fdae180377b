"""The durations of vLLM's steps, and the prompt tokens that are as long as a step of answers."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.engine.vllm.scheduling.pace import Pace, StepClock


def test_a_step_lasts_from_the_previous_end_or_from_the_first_request() -> None:
    """vLLM plans a step while the previous one is computed; idle time belongs to no step."""
    clock = StepClock()
    clock.arrived(10.0)
    clock.arrived(10.5)
    assert clock.step_s(11.0, requests=2) == 1.0
    assert clock.step_s(13.0, requests=1) == 2.0
    assert clock.step_s(13.5, requests=0) == 0.5
    clock.arrived(100.0)
    assert clock.step_s(100.25, requests=0) == 0.25


@given(
    answers_s=st.floats(0.001, 0.2),
    tokens_per_s=st.floats(200.0, 200_000.0),
    slow_steps=st.integers(0, 5),
    slower=st.floats(1.0, 30.0),
    beside=st.lists(st.booleans(), min_size=20, max_size=20).filter(any),
)
def test_a_floods_tokens_take_half_the_time_of_the_answers(
    answers_s: float, tokens_per_s: float, slow_steps: int, slower: float, beside: list[bool]
) -> None:
    """On any machine, whether a flood is always beside answers or not, though the first steps are slow."""
    pace, tokens, used = Pace(), 0, list[int]()
    for number in range(600 * len(beside) // sum(beside)):
        answers = beside[number % len(beside)]
        tokens = pace.gentle_tokens if answers else 512
        used += [tokens] if answers else []
        took_s = tokens / tokens_per_s + (answers_s if answers else 0.0)
        pace.stepped(tokens, took_s * (slower if number < slow_steps else 1.0), answers=answers)
    usual = statistics.median(used[-50:])
    assert usual == pytest.approx(min(512, max(16, answers_s * tokens_per_s / 2)), rel=0.1, abs=2)


@given(st.lists(st.tuples(st.integers(0, 4096), st.floats(0.0, 100.0), st.booleans()), max_size=50))
def test_any_steps_leave_a_flood_some_tokens(steps: list[tuple[int, float, bool]]) -> None:
    pace = Pace()
    for tokens, took_s, answers in steps:
        pace.stepped(tokens, took_s, answers=answers)
        assert 16 <= pace.gentle_tokens <= 512
