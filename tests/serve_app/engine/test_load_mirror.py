"""vLLM's load is told as it is, from submissions and the prompt tokens of its steps."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from router.protocol.request import Decision
from serve_app.engine.load_mirror import LiveRequest, LoadMirror
from serve_app.engine.protocol import QueueFull
from serve_app.engine.reports import ROUTERS_REMEMBERED, EngineMeters
from serve_app.engine.vllm.settings import VllmSettings
from tests.serve_app.engine.tiny import request

PROMPTS = st.lists(st.integers(1, 500), max_size=12)


class Load(LoadMirror):
    """``max_num_seqs`` 4 and a queue of 8, for two tenants unless others are given."""

    def __init__(self, *tenants: str) -> None:
        self.meters = EngineMeters()
        shares = dict.fromkeys(tenants or ("flood", "calm"), 1.0)
        settings = VllmSettings("m", max_num_seqs=4, max_waiting_requests=8, tenant_shares=shares)
        super().__init__(settings, self.meters)

    def arrives(
        self, name: str, tokens: int, router: str = "", reservation: int = 0, tenant: str = "default", order: int = 0
    ) -> None:
        asked = structs.replace(
            request(name, [1] * tokens, tenant=tenant), decision=Decision("", router, reservation, 0, 0, "cold")
        )
        asked = structs.replace(asked, order=order)
        self.arrived(LiveRequest(asked, print, {}, 0.0, tokens))


@pytest.mark.parametrize("flex", [False, True])
@pytest.mark.parametrize(("tenants", "committed"), [(["calm"], (100, 1)), (["flood", "calm"], (100, 0))])
def test_requests_of_a_late_order_are_ahead_of_no_newcomer(
    tenants: list[str], committed: tuple[int, int], flex: bool
) -> None:
    """Only their tokens in progress are ahead, and none of one that yields, which nobody sees."""
    load = Load(*tenants)
    load.arrives("flex", 1000, tenant="calm", order=2**32 if flex else 9)
    load.arrives("usual", 100, tenant="calm")
    report = load.report(0.0)
    assert (report.committed_prefill_tokens, report.committed_sequences) == committed
    assert report.queued_prefill_tokens == (100 if flex else 1100)
    load.stepped(2, 0.1, 40, 0.1)
    most = 1060 if len(tenants) == 1 else 128
    assert load.report(0.0).committed_prefill_tokens == (60 if flex else most)


@given(prompts=PROMPTS, budget=st.integers(1, 300), arrivals=st.lists(st.booleans(), max_size=60))
def test_queued_tokens_are_those_that_a_first_come_scheduler_has_left(
    prompts: list[int], budget: int, arrivals: list[bool]
) -> None:
    """The mirror equals the tokens left in a naive scheduler of ``budget`` tokens per step, oldest first."""
    load, coming, left = Load("default"), deque(enumerate(prompts)), {}
    for arrives in arrivals:
        if arrives and coming:
            number, tokens = coming.popleft()
            left[number] = tokens
            load.arrives(str(number), tokens, f"router {number % 2}", number + 1)
        else:
            room = budget
            for number in list(left):
                part = min(room, left[number])
                left[number] -= part
                room -= part
            load.stepped(len(left), 0.5, budget - room, 0.01)
        report = load.report(0.0)
        assert report.queued_prefill_tokens == report.committed_prefill_tokens == sum(left.values())


def test_tokens_that_nobody_waits_for_are_recomputed_ones() -> None:
    """After a preemption vLLM recomputes prompt tokens of requests that already have their first token."""
    load = Load()
    load.arrives("a", 500, "router", 3)
    load.stepped(1, 0.1, 100, 0.1)
    load.begun(load.live["a"], 400)
    load.stepped(1, 0.1, 40, 0.1)
    assert (load.meters.computed_prompt_tokens, load.meters.recomputed_tokens) == (100, 40)
    report = load.report(1.0)
    assert (report.queued_prefill_tokens, report.admitted) == (0, {"router": 3})


def test_an_overtaking_requests_tokens_count_for_its_own_prompt() -> None:
    """Another tenant's turn comes before the end of an older prompt; a newcomer waits for a turn at most."""
    load = Load()
    load.arrives("old", 1000, tenant="flood")
    load.arrives("short", 100, tenant="calm")
    assert load.report(0.0).committed_prefill_tokens == 100
    load.stepped(2, 0.1, 300, 0.1)
    load.begun(load.live["short"], 0)
    assert [load.queued_tokens, load.live["old"].uncached_tokens] == [800, 800]
    assert (load.report(1.0).queued_prefill_tokens, load.report(1.0).committed_prefill_tokens) == (800, 128)


def test_what_was_computed_of_a_prompt_is_known_also_when_it_was_left_in_a_step() -> None:
    """The step in progress still counts for it, in the order of arrival; one that waited has nothing computed."""
    load = Load()
    for name, tokens in (("first", 1000), ("waiting", 500), ("answered", 300)):
        load.arrives(name, tokens)
    first, waiting, answered = (load.live[name] for name in ("first", "waiting", "answered"))
    load.stepped(1, 0.1, 400, 0.1)
    load.ended(first, left=True)
    load.ended(waiting, left=True)
    assert (load.left, load.queued_tokens) == ([first, waiting], 300)
    load.stepped(1, 0.1, 400, 0.1)
    assert [live.prefilled for live in (first, waiting)] == [(800, 0), (0, 0)]
    load.left = []
    load.stepped(1, 0.1, 44, 0.1)
    load.begun(answered, 256)
    assert answered.prefilled == (300, 256)
    load.ended(answered, left=True)
    assert load.left == [], "it had its first token"


def test_running_and_waiting_requests() -> None:
    """A request waits until a step's figures count it as running; an ended one counts for neither at once."""
    load = Load()
    for name in "abc":
        load.arrives(name, 10)
    assert (load.running, load.waiting) == (0, 3)
    load.stepped(2, 0.5, 20, 0.01)
    load.begun(load.live["a"], 0)
    assert (load.running, load.waiting, load.queued_tokens) == (2, 1, 10)
    samples = {dict(labels).get("state"): value for _, labels, value in load.gauges(10, 4, 2, ())}
    assert [samples[state] for state in ("used", "cached", "free")] == [3, 4, 3]
    for name in "abc":
        load.ended(load.live[name])
    assert (load.running, load.waiting, load.line.used) == (0, 0, 0)


def test_the_queue_is_bounded_and_its_end_is_for_others() -> None:
    """Among several tenants one alone fills seven eighths of the queue; a request with a token waits no more."""
    load = Load()
    for number in range(7):
        load.arrives(str(number), 10, tenant="flood")
    with pytest.raises(QueueFull):
        load.check("flood")
    load.check("calm")
    load.begun(load.live["0"], 0)
    load.begun(load.live["0"], 0)
    load.check("flood")
    load.arrives("more", 10, tenant="flood")
    with pytest.raises(QueueFull):
        load.check("flood")
    load.ended(load.live["1"])
    load.check("flood")


def test_only_so_many_routers_are_remembered() -> None:
    """Routers come and go for as long as a replica lives."""
    load = Load()
    for number in range(ROUTERS_REMEMBERED + 10):
        load.arrives(str(number), 0, f"router {number}", 1)
        load.ended(load.live[str(number)])
    admitted = load.report(0.0).admitted
    assert (len(admitted), next(iter(admitted))) == (ROUTERS_REMEMBERED, "router 10")


def test_copies_are_no_prompt_and_say_nothing_of_the_rate() -> None:
    """Their tokens belong to no prompt; tokens that a copy failed to bring are queued again."""
    load = Load()
    load.arrives("waits", 10)
    load.copies()
    load.stepped(1, 0.1, 1, 0.5)
    meters = load.meters
    assert (meters.computed_prompt_tokens, meters.recomputed_tokens, meters.prefill_tokens_per_s) == (0, 0, 0.0)
    load.live["waits"].uncached_tokens = 300
    assert load.queued_tokens == 300
    load.copies()
    load.stepped(1, 0.1, 201, 0.1)
    assert (meters.computed_prompt_tokens, load.queued_tokens, meters.prefill_tokens_per_s) == (200, 100, 2000)
