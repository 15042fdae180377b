"""Shadow mode: a second policy decides about everything, acts on nothing, is counted apart and hurts nobody."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core import RoutingCore
from router.policy.policies import POLICIES, Policy
from router.protocol.events import BlocksStored, LoadReport
from router.protocol.request import Decision, RoutedRequest
from router.settings import RouterSettings
from tests.router.observe.four_replicas import core_with, request


class Ticking:
    """A clock that moves by one second a reading."""

    now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


def decisions(core: RoutingCore, numbers: list[int]) -> list[Decision | None]:
    return [core.decide(request(number)) for number in numbers]


@pytest.mark.parametrize("shadow", POLICIES)
@settings(max_examples=20)
@given(policy=st.sampled_from(sorted(POLICIES)), numbers=st.lists(st.integers(0, 50), max_size=12))
def test_a_shadow_never_changes_a_decision(shadow: str, policy: str, numbers: list[int]) -> None:
    """Decisions and the acting policy's counters are the same with any shadow and without one. (docs/routing.md)"""
    plain, shadowed = core_with(policy), core_with(policy, shadow)
    assert decisions(plain, numbers) == decisions(shadowed, numbers)
    assert plain.counters == shadowed.counters
    assert plain.state()["replicas"] == shadowed.state()["replicas"]
    assert shadowed.shadow is not None
    assert shadowed.shadow[1].decisions == len(numbers)


@settings(max_examples=20)
@given(policy=st.sampled_from(["estimated_ttft", "lmetric", "bounded_hash", "sglang"]), number=st.integers(0, 50))
def test_a_shadow_of_the_same_policy_always_agrees(policy: str, number: int) -> None:
    """Both see one state: the acting reservation is not there yet when the shadow decides."""
    core = core_with(policy, policy)
    made = decisions(core, [number, number + 1, number])
    assert core.shadow is not None
    counters = core.shadow[1]
    assert (counters.decisions, counters.agreed) == (3, 3)
    assert counters.cached_tokens == counters.acting_cached_tokens == sum(d.selected_cached_tokens for d in made if d)
    assert counters.estimated_ttft_s == pytest.approx(sum(d.estimated_ttft_s for d in made if d))


def heated(policy: str, shadow: str, decisions: int = 300) -> tuple[RoutingCore, list[Decision]]:
    """A prefix of 2,048 tokens that brings three replicas' worth of work; whoever gets a request holds it from then on.

    Requests are done before the next one comes, so that nothing but demand is a reason for one more holder.
    """
    now_s = 0.0
    core = RoutingCore("me", RouterSettings(policy, shadow_policy=shadow), clock=lambda: now_s, rng=Random(1))
    core.update_replicas("abcdef")
    prefix, made = Random(1).randbytes(16 * 128), []
    for name in "abcdef":
        core.apply(name, "e", [LoadReport(0, 0, 0, 0, 0, 1000.0, 0.01, pull_tokens_per_s=50_000.0)])
    for number in range(decisions):
        now_s += 1 / 30
        chain = prefix + Random(number).randbytes(16 * 6)
        decision = core.decide(RoutedRequest(f"q{number}", chain, 2148, b"k" * 16))
        assert decision is not None
        core.release(decision)
        core.apply(decision.replica_id, "e", [BlocksStored(prefix)])
        made.append(decision)
    return core, made


def test_a_shadow_knows_hot_prefixes_as_the_acting_policy_does() -> None:
    """Beside itself it agrees about every new holder, and each counts the demand for itself alone."""
    core, made = heated("estimated_ttft", "estimated_ttft")
    assert made == heated("estimated_ttft", "")[1]
    assert core.shadow is not None
    counters = core.shadow[1]
    assert (counters.decisions, counters.agreed, counters.faults) == (300, 300, 0)
    assert counters.by_reason == Counter(decision.reason for decision in made)
    assert counters.by_reason["hot_prefix"] >= 3


def test_a_shadow_counts_demand_where_the_acting_policy_counts_none() -> None:
    """Beside a policy without that rule it names the moments at which it would have made one more holder."""
    core, made = heated("lmetric", "estimated_ttft")
    assert made == heated("lmetric", "")[1]
    assert len({decision.replica_id for decision in made}) == 1
    assert core.shadow is not None
    counters = core.shadow[1]
    assert counters.by_reason["hot_prefix"] == counters.decisions - counters.agreed > 0


def test_would_be_figures_are_the_shadows_own() -> None:
    """Round robin's choices in the shadow count what round robin would have had."""
    core = core_with("estimated_ttft", "round_robin")
    acting = [decision for decision in decisions(core, [1, 2, 3, 4]) if decision]
    lone = [decision for decision in decisions(core_with("round_robin"), [1, 2, 3, 4]) if decision]
    shown = core.state()["shadow"]
    assert shown["policy"] == "round_robin"
    assert shown["selected_cached_tokens"] == sum(decision.selected_cached_tokens for decision in lone)
    assert shown["acting_selected_cached_tokens"] == sum(decision.selected_cached_tokens for decision in acting)
    assert shown["agreement_rate"] == shown["agreed"] / 4
    assert shown["by_reason"] == {"round_robin": 4}
    assert set(core.state()["regret"]) == {"estimated_ttft"}


def test_its_time_is_measured_apart() -> None:
    """By a clock of one second a reading the acting path takes the same with and without a shadow."""
    took = []
    for shadow in ("", "lmetric"):
        core = RoutingCore("me", RouterSettings(shadow_policy=shadow), clock=Ticking(), rng=Random(1))
        core.update_replicas("ab")
        core.decide(request(1))
        took.append(core.counters.decision_s.total)
    assert core.shadow is not None
    assert core.shadow[1].decision_s.total == 1.0
    assert took[1] - took[0] == 1.0  # the second reading around the shadow; what lies between them is not in it


def test_a_fault_in_the_shadow_goes_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shadow that raises is counted, and traffic does not notice."""

    def broken(*_: object) -> list[object]:
        raise RuntimeError("no")

    monkeypatch.setitem(POLICIES, "sglang", lambda _: Policy(broken))
    core = core_with("estimated_ttft", "sglang")
    assert decisions(core, [1, 2]) == decisions(core_with("estimated_ttft"), [1, 2])
    assert core.shadow is not None
    assert (core.shadow[1].faults, core.shadow[1].decisions) == (2, 0)


def test_settings_change_the_shadow() -> None:
    """Another shadow starts from zero; an unknown one is refused."""
    core = core_with("estimated_ttft", "sglang")
    core.decide(request(1))
    core.configure(RouterSettings(shadow_policy="lmetric"))
    assert core.shadow is not None
    assert (core.shadow[0], core.shadow[1].decisions) == ("lmetric", 0)
    core.decide(request(2))
    core.configure(RouterSettings(shadow_policy="lmetric", block_size=32))
    assert core.shadow[1].decisions == 0
    core.configure(RouterSettings())
    assert core.shadow is None
    assert core.state()["shadow"] is None
    with pytest.raises(ValueError, match="unknown routing policy 'best'"):
        RouterSettings(shadow_policy="best")
