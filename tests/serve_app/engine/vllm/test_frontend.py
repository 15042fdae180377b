"""The duration of vLLM's steps."""

from serve_app.engine.vllm.frontend import StepClock


def test_a_step_lasts_from_the_previous_end_or_from_the_first_request() -> None:
    """vLLM plans a step while the previous one is computed; idle time belongs to no step."""
    clock = StepClock()
    clock.asked(10.0)
    clock.asked(10.5)
    assert clock.step_s(11.0, requests=2) == 1.0
    assert clock.step_s(13.0, requests=1) == 2.0
    assert clock.step_s(13.5, requests=0) == 0.5
    clock.asked(100.0)
    assert clock.step_s(100.25, requests=0) == 0.25
