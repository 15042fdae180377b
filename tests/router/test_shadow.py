"""A shadow policy decides about requests, acts on none, is counted apart, and takes a bounded time."""

import logging
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.candidates import Candidate, RoutingView
from router.core import RoutingCore
from router.observe import ShadowCounters
from router.policies import POLICIES, Policy
from router.protocol.events import BlocksStored
from router.protocol.request import Decision
from router.settings import RouterSettings
from router.shadow import BUDGET_S
from tests.router.cores import CHAIN, ask, core_of, decided, load

NAMES = "abcd"
POLICY = st.sampled_from(sorted(POLICIES))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 20), st.booleans(), st.sampled_from([(), ("a",), tuple(NAMES)])),
        st.tuples(st.sampled_from(["release", "reroute", "report"]), st.integers(0, 9)),
        st.tuples(st.just("store"), st.sampled_from(NAMES), st.integers(0, 20)),
        st.tuples(st.just("load"), st.sampled_from(NAMES), st.integers(0, 30_000), st.integers(0, 18)),
        st.tuples(st.just("explain")),
    ),
    max_size=20,
)


def play(core: RoutingCore, steps: list[tuple[Any, ...]]) -> list[Decision | None]:
    """Return the decisions about the steps' requests."""
    made: list[Decision | None] = []
    for number, (kind, *how) in enumerate(steps):
        decision = made[how[0] % len(made)] if made and kind in ("release", "reroute", "report") else None
        if kind == "ask":
            blocks, rerouted, blocked = how
            made.append(core.decide(ask(number, CHAIN[: 16 * blocks], rerouted=int(rerouted)), blocked))
        elif kind == "store":
            core.apply(how[0], [BlocksStored(CHAIN[: 16 * how[1]])])
        elif kind == "load":
            core.apply(how[0], [load(how[1], waiting=how[2])])
        elif kind == "explain":
            core.explain(ask(), list(POLICIES))
        elif decision is not None and kind == "reroute":
            core.rerouted(decision, load(100))
        elif decision is not None:
            core.release(decision) if kind == "release" else core.reported(decision)
    return made


def bare(decision: Decision | None) -> tuple[Any, ...] | None:
    """Return what a decision consists of, without the shadow's."""
    return decision and tuple(getattr(decision, name) for name in Decision.__struct_fields__ if name != "shadow")


@settings(max_examples=150)
@given(acting=POLICY, shadow=POLICY, steps=STEPS)
def test_a_shadow_never_changes_a_decision(acting: str, shadow: str, steps: list[tuple[Any, ...]]) -> None:
    """Decisions, loads and counters are the same with any shadow and without one. (docs: routing)"""
    plain, shadowed = core_of(NAMES, policy=acting), core_of(NAMES, policy=acting, shadow_policy=shadow)
    without, beside = play(plain, steps), play(shadowed, steps)
    assert [bare(decision) for decision in beside] == [bare(decision) for decision in without]
    assert shadowed.state() == plain.state()
    first = [
        made for made, how in zip(beside, (how for kind, *how in steps if kind == "ask"), strict=True) if not how[1]
    ]
    told = [decision.shadow for decision in first if decision is not None]
    assert all(choice is not None and choice.policy == shadow for choice in told)
    counted = shadowed.counters.shadows.pop((acting, shadow))
    assert counted.decisions == len(told)
    assert counted.different == sum(choice is not None and not choice.same for choice in told)
    assert counted.predicted_tokens == sum(choice.predicted_tokens for choice in told if choice)
    assert repr(shadowed.counters) == repr(plain.counters)


@settings(max_examples=50)
@given(policy=st.sampled_from(["estimated_ttft", "lmetric", "bounded_hash", "sglang"]), steps=STEPS)
def test_a_shadow_of_the_same_policy_agrees(policy: str, steps: list[tuple[Any, ...]]) -> None:
    """Both see one state: the acting reservation is not there yet when the shadow decides."""
    core = core_of(NAMES, policy=policy, shadow_policy=policy)
    for decision in play(core, steps):
        if decision is not None and decision.shadow is not None:
            shadow = decision.shadow
            assert (shadow.same, shadow.replica_id) == (True, decision.replica_id)
            assert shadow.predicted_tokens == decision.selected_cached_tokens
            assert shadow.estimated_ttft_s == decision.estimated_ttft_s
    counted = core.counters.shadows[policy, policy]
    assert (counted.different, counted.faults) == (0, 0)
    assert counted.predicted_tokens == counted.acting_predicted_tokens
    assert counted.estimated_ttft_s == counted.acting_estimated_ttft_s


@settings(max_examples=50)
@given(acting=POLICY, shadow=POLICY, steps=STEPS)
def test_explain_names_the_shadows_next_choice(acting: str, shadow: str, steps: list[tuple[Any, ...]]) -> None:
    """Its winner is what the next decision's shadow tells, also of policies with a turn or with randomness."""
    core = core_of(NAMES, policy=acting, shadow_policy=shadow)
    play(core, steps)
    said = core.explain(ask(), [acting])["shadow"]
    decision = core.decide(ask(99))
    assert said["policy"] == shadow and said["because"]
    if decision is not None:
        assert decision.shadow is not None
        assert said["replica_id"] == decision.shadow.replica_id
    assert core_of(NAMES).explain(ask(), [acting])["shadow"] is None


def test_what_it_tells_is_of_its_own_choice() -> None:
    """A shadow that ignores caches predicts what the replica of its turn holds, and a longer time."""
    core = core_of("ab", {"a": CHAIN}, shadow_policy="round_robin")
    told = [decided(core, ask(number)) for number in range(4)]
    assert {decision.replica_id for decision in told} == {"a"}
    shadows = [decision.shadow for decision in told if decision.shadow is not None]
    assert sorted((shadow.replica_id, shadow.same, shadow.predicted_tokens) for shadow in shadows) == [
        *[("a", True, 320)] * 2, *[("b", False, 0)] * 2,
    ]  # fmt: skip
    counted = core.counters.shadows["estimated_ttft", "round_robin"]
    assert (counted.decisions, counted.different, counted.prompt_tokens) == (4, 2, 4 * 325)
    assert (counted.predicted_tokens, counted.acting_predicted_tokens) == (640, 1280)
    assert counted.estimated_ttft_s == sum(shadow.estimated_ttft_s for shadow in shadows)
    assert counted.acting_estimated_ttft_s == sum(decision.estimated_ttft_s for decision in told)


class Slow:
    """A clock by which each reading, and so each comparison, takes ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self.now_s = 0.0
        self.seconds = seconds

    def __call__(self) -> float:
        self.now_s += self.seconds
        return self.now_s


def compared(core: RoutingCore, requests: int = 4000) -> list[int]:
    """Return the numbers of the requests that the shadow decided about."""
    found = []
    for number in range(requests):
        decision = decided(core, ask(number, CHAIN[:32]))
        core.release(decision)
        if decision.shadow is not None:
            found.append(number)
    return found


@pytest.mark.parametrize("times", [2.0, 4.0, 10.0])
def test_a_slow_shadow_decides_about_a_part_of_the_requests(times: float) -> None:
    """So many that its time a request is the budget; by their ids, so every kind of traffic is among them."""
    core = core_of("ab", clock=Slow(times * BUDGET_S), shadow_policy="lmetric")
    settled = [number for number in compared(core) if number >= 1000]
    assert core.shadow is not None
    assert core.shadow.share == pytest.approx(1 / times, rel=0.05)
    assert len(settled) / 3000 == pytest.approx(1 / times, rel=0.15)
    assert len({after - before for before, after in pairwise(settled)}) > 3, "not every nth"
    other = core_of("ab", clock=Slow(times * BUDGET_S), shadow_policy="lmetric", name="other")
    assert set(settled) == {number for number in compared(other) if number >= 1000}, "ingresses agree"


def test_other_threads_do_not_silence_a_shadow() -> None:
    """A comparison that a switch of threads made long counts in part, and is soon forgotten."""
    clock = Slow(BUDGET_S / 2)
    core = core_of("ab", clock=clock, shadow_policy="lmetric")
    compared(core, 100)
    clock.seconds = 5.0
    compared(core, 1)
    clock.seconds = BUDGET_S / 2
    assert len(compared(core, 1000)) > 500
    assert core.shadow is not None
    assert core.shadow.share == 1.0


def _broken(view: RoutingView, limit: int | None = None) -> list[Candidate]:
    raise RuntimeError("no")


def test_a_fault_in_a_shadow_goes_no_further(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A shadow that raises is counted and logged once, and traffic does not notice."""
    monkeypatch.setitem(POLICIES, "sglang", Policy(_broken))
    core = core_of("ab", shadow_policy="sglang")
    with caplog.at_level(logging.ERROR):
        made = [decided(core, ask(number)) for number in range(3)]
    assert [decision.shadow for decision in made] == [None] * 3
    assert [bare(decision) for decision in made] == [
        bare(decided(plain, ask(number))) for plain in [core_of("ab")] for number in range(3)
    ]
    assert core.counters.shadows["estimated_ttft", "sglang"] == ShadowCounters(faults=3)
    assert len(caplog.records) == 1


def test_settings_change_the_shadow() -> None:
    """From the next decision on; its counters stay. An unknown policy is refused."""
    core = core_of("ab", shadow_policy="sglang")
    decided(core, ask(1))
    for shadow in ("lmetric", "", "sglang"):
        core.configure(RouterSettings(shadow_policy=shadow))
        choice = decided(core, ask(2)).shadow
        assert (choice.policy if choice else "") == shadow
    counted = {shadow: counters.decisions for (_, shadow), counters in core.counters.shadows.items()}
    assert counted == {"sglang": 2, "lmetric": 1}
    with pytest.raises(ValueError, match="unknown routing policy 'best'"):
        RouterSettings(shadow_policy="best")


def test_randomness_of_a_shadow_is_its_own() -> None:
    """A random shadow beside the same random policy is another draw, so that neither follows the other."""
    core = core_of("abcdefgh", policy="power_of_two", shadow_policy="power_of_two")
    same = []
    for number in range(200):
        decision = decided(core, ask(number))
        core.release(decision)
        same.append(decision.shadow is not None and decision.shadow.same)
    assert 0 < sum(same) < 200
