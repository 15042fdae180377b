"""What is queued is known to the token from submissions and steps alone."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from serve_app.engine.metrics import EngineMeters
from serve_app.engine.reservations import ROUTERS_REMEMBERED
from serve_app.engine.vllm.load_mirror import LoadMirror, StepStats

PROMPTS = st.lists(st.integers(1, 500), max_size=12)


def mirror() -> LoadMirror:
    return LoadMirror(4, 16, EngineMeters())


@given(prompts=PROMPTS, budget=st.integers(1, 300), arrivals=st.lists(st.booleans(), max_size=60))
def test_queued_tokens_are_those_that_a_first_come_scheduler_has_left(
    prompts: list[int], budget: int, arrivals: list[bool]
) -> None:
    """A naive scheduler that computes ``budget`` tokens a step, oldest first, has left what the mirror says."""
    load, coming, left = mirror(), deque(enumerate(prompts)), {}
    for arrives in arrivals:
        if arrives and coming:
            number, tokens = coming.popleft()
            left[number] = tokens
            load.arrived(str(number), f"router {number % 2}", number + 1, tokens)
        else:
            room, taken = budget, 0
            for number in list(left):
                part = min(room, left[number])
                left[number] -= part
                room -= part
                taken += part
            load.stepped(StepStats(len(left), 0.5, taken, 0, 0.01))
        report = load.report(0.0)
        assert report.queued_prefill_tokens == report.committed_prefill_tokens == sum(left.values())
        for share in report.shares:
            own = [tokens for number, tokens in left.items() if f"router {number % 2}" == share.router_id]
            assert share.queued_prefill_tokens == sum(own)


def test_what_nobody_waits_for_was_computed_again() -> None:
    """After a preemption vLLM computes tokens of prompts that are no prefill any more."""
    meters = EngineMeters()
    load = LoadMirror(4, 16, meters)
    load.arrived("a", "", 0, 100)
    load.stepped(StepStats(1, 0.1, 100, 0, 0.1))
    load.begun("a")
    load.stepped(StepStats(1, 0.1, 40, 0, 0.1))
    assert (meters.computed_prompt_tokens, meters.recomputed_tokens) == (100, 40)


def test_a_wrong_guess_of_what_is_cached_ends_with_the_first_token() -> None:
    """The hint may be too low or too high; once a request has a token nothing of its prompt is queued."""
    load = mirror()
    load.arrived("a", "router", 3, 500)
    load.begun("a")
    report = load.report(1.0)
    assert (report.queued_prefill_tokens, report.shares[0].last_reservation) == (0, 3)
    load.ended("a")
    assert load.report(1.0).running_sequences == load.report(1.0).waiting_sequences == 0


def test_who_runs_and_who_waits() -> None:
    """A request waits until a step's figures count it as running; one that ended counts for neither at once."""
    load = mirror()
    for name in "abc":
        load.arrived(name, "", 0, 10)
    assert (load.running, load.waiting) == (0, 3)
    load.stepped(StepStats(2, 0.5, 20, 0, 0.01))
    assert (load.running, load.waiting) == (2, 1)
    for name in "abc":
        load.ended(name)
    assert (load.running, load.waiting) == (0, 0)


def test_only_so_many_routers_are_remembered() -> None:
    """Routers come and go for as long as a replica lives."""
    load = mirror()
    for number in range(ROUTERS_REMEMBERED + 10):
        load.arrived(str(number), f"router {number}", 1, 0)
        load.ended(str(number))
    shares = load.report(0.0).shares
    assert len(shares) == ROUTERS_REMEMBERED
    assert shares[0].router_id == "router 10"


def test_copies_are_no_prompt_and_say_nothing_of_the_rate() -> None:
    """Their tokens are nobody's; what a copy was to bring and did not is queued after all."""
    meters = EngineMeters()
    load = LoadMirror(4, 16, meters)
    load.arrived("waits", "", 0, 10)
    load.copies()
    load.stepped(StepStats(1, 0.1, 1, 0, 0.5))
    assert (meters.computed_prompt_tokens, meters.recomputed_tokens, meters.prefill_tokens_per_s) == (0, 0, 0.0)
    assert load.queued_tokens == 10
    load.recount("waits", 300)
    load.recount("ended long ago", 300)
    assert load.queued_tokens == 300
    load.copies()
    load.stepped(StepStats(1, 0.1, 201, 0, 0.1))
    assert (meters.computed_prompt_tokens, load.queued_tokens) == (200, 100)
    assert meters.prefill_tokens_per_s == 2000
