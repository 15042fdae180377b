"""What our scheduler does in a step beside vLLM's own, counted in calls, which no other load on a machine changes."""

import sys
from types import FrameType

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from serve_app.engine.vllm.scheduling import probe
from serve_app.engine.vllm.settings import IN_CORE

STEPS = 20
MOST = 25
"""Python calls more a step than vLLM's scheduler alone, of any number of answers of one tenant."""


def calls(answers: int, tenants: int = 1) -> float:
    """Return the calls of Python's functions in a step that goes on with so many answers."""
    tried = probe.SchedulerProbe(*IN_CORE, places=answers)
    for number in range(answers):
        tried.ask(f"tenant {number % tenants}", probe.prompt(number % 60, 0))
    running = 0
    while running < answers:
        running = len(tried.step())
    counted = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal counted
        counted += event == "call" and frame.f_code.co_filename != probe.__file__

    sys.setprofile(count)
    try:
        for _ in range(STEPS):
            assert len(tried.step()) == answers
    finally:
        sys.setprofile(None)
    return counted / STEPS


@pytest.mark.parametrize("answers", [1, 16, 64, 256])
def test_a_step_of_one_tenant_costs_what_vllms_does(answers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of ours is done for each answer."""
    ours = calls(answers)
    monkeypatch.setattr(probe, "TenantScheduler", Scheduler)
    theirs = calls(answers)
    assert theirs < ours <= theirs + MOST
