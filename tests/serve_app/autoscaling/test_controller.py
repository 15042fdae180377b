"""The policies as Ray Serve's controller calls them, inside Serve's own wrapper, without a cluster.

Figures become signals only if they are complete, fresh and of one version; those of ingresses are merged.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingPolicy

from router.protocol.autoscaling import IngressFigures, ReplicaFigures
from serve_app.app import INGRESS_POLICY, REPLICA_POLICY, _autoscaling
from serve_app.autoscaling import board
from serve_app.autoscaling.policy import CONTROL_PERIOD_S
from serve_app.autoscaling.signals import OLD_AFTER_S, signals
from tests.harness.virtual_time import Clock

REPLICA = ReplicaFigures(
    version=1, arrived_tokens=1e6, queued_tokens=8000, prefill_tokens_per_s=4000, running=10, waiting=2, slots=16,
    pool_tokens=4e5, used_tokens=1e5, pinned_tokens=1000, pin_budget_tokens=1e5,
    hands_over=1,
)  # fmt: skip
INGRESS = IngressFigures(
    requests=100, p90_ttft_s=2.0, p90_own_s=1.0, mean_own_s=0.5, waiting_requests=4, working_set_tokens=1e5,
    min_replicas=1, max_replicas=8, target_ttft_s=2.0, upscale_delay_s=10, downscale_delay_s=600,
)  # fmt: skip


def test_sums_means_and_requests_queued_at_the_ingress() -> None:
    """Two replicas and two ingresses, one with three times the traffic."""
    busy = replace(INGRESS, requests=300, p90_ttft_s=4.0, waiting_requests=0, working_set_tokens=5e4)
    seen = signals(2, ["a", "b"], {"a": (0.5, REPLICA), "b": (1.0, REPLICA)}, [(0.1, INGRESS), (0.2, busy)])
    assert seen.fault == ""
    token_s = 1.1 / 4000  # ten decoding sequences slow it by a tenth
    assert seen.token_s == pytest.approx(token_s)
    assert seen.backlog_s == pytest.approx(16_000 * token_s + 4 * 0.5)
    assert (seen.decoding, seen.slots, seen.used_tokens, seen.pool_tokens) == (24, 16, 2e5, 4e5)
    assert (seen.requests, seen.p90_ttft_s, seen.working_set_tokens) == (400, pytest.approx(3.5), 1e5)


FIGURES = st.builds(
    replace,
    st.just(REPLICA),
    hands_over=st.sampled_from([0.0, 1.0]),
    slots=st.integers(1, 64),
    pool_tokens=st.floats(1, 1e6),
    pin_budget_tokens=st.floats(1, 1e6),
    used_tokens=st.floats(0, 1e6),
    pinned_tokens=st.floats(0, 1e6),
    running=st.integers(0, 64),
    waiting=st.integers(0, 64),
)


@given(st.lists(FIGURES, min_size=1, max_size=5))
def test_what_a_replica_can_do_is_what_the_least_able_can_and_what_it_holds_adds_up(told: list[ReplicaFigures]) -> None:
    """During a rolling update the replicas differ: saves survive only if each replica hands its own over."""
    names = [f"r{number}" for number in range(len(told))]
    seen = signals(2, names, {name: (0.1, one) for name, one in zip(names, told, strict=True)}, [(0.1, INGRESS)])
    assert seen.fault == ""
    assert seen.hands_over == (min(one.hands_over for one in told) == 1)
    for name in ("slots", "pool_tokens", "pin_budget_tokens"):
        assert getattr(seen, name) == min(getattr(one, name) for one in told)
    for name in ("used_tokens", "pinned_tokens"):
        assert getattr(seen, name) == pytest.approx(sum(getattr(one, name) for one in told))
    assert seen.decoding == sum(one.running + one.waiting for one in told)


@pytest.mark.parametrize(
    ("replicas", "ingresses", "words"),
    [
        ({}, [(0.0, INGRESS)], "2 of 2 replicas"),
        ({"a": (0.0, REPLICA)}, [(0.0, INGRESS)], "1 of 2 replicas"),
        ({"a": (0.0, REPLICA), "b": (OLD_AFTER_S + 1, REPLICA)}, [(0.0, INGRESS)], "1 of 2 replicas"),
        ({"a": (0.0, REPLICA), "b": (0.0, REPLICA)}, [], "no ingress"),
        ({"a": (0.0, REPLICA), "b": (0.0, REPLICA)}, [(OLD_AFTER_S + 1, INGRESS)], "no ingress"),
        ({"a": (0.0, REPLICA), "b": (0.0, replace(REPLICA, version=2))}, [(0.0, INGRESS)], "two versions"),
    ],
)
def test_missing_old_or_mixed_reports_are_a_fault(replicas: Any, ingresses: Any, words: str) -> None:
    assert words in signals(2, ["a", "b"], replicas, ingresses).fault
    assert signals(2, [], replicas, ingresses).fault == "no replica runs"


@given(st.dictionaries(st.sampled_from([*REPLICA.to_floats(), "other"]), st.floats() | st.just(1.0)))
def test_nonsense_is_refused_and_figures_survive_the_transport(floats: dict[str, float]) -> None:
    """Any report is either valid figures or a ValueError; figures are read back as written."""
    assert ReplicaFigures.of(REPLICA.to_floats()) == REPLICA
    try:
        figures = ReplicaFigures.of({**REPLICA.to_floats(), **floats})
    except ValueError:
        return
    assert all(0.0 <= value < float("inf") for value in figures.to_floats().values())


DEPLOYMENT = DeploymentID(name="Replica", app_name="app")


clock = Clock()


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Provide a clock that the test moves, no Ray to notify, and a separate board."""
    monkeypatch.setattr("time.monotonic", clock)
    monkeypatch.setattr(board, "_boards", {})
    monkeypatch.setattr(board, "post", lambda *_: None)


@dataclass
class Context:
    """The part of Serve's policy context that our policy and Serve's wrapper read."""

    target_num_replicas: int
    raw_metrics: Any
    running_replicas: list[ReplicaID] = field(default_factory=list)
    app_name: str = "app"
    deployment_name: str = "Replica"
    total_num_requests: float = 1000.0
    policy_state: dict[str, Any] = field(default_factory=dict)
    config: Any = field(default_factory=lambda: _autoscaling(REPLICA_POLICY, 1, 512))

    @property
    def current_num_replicas(self) -> int:
        return len(self.running_replicas)


def ids(count: int) -> list[ReplicaID]:
    return [ReplicaID(f"r{number}", DEPLOYMENT) for number in range(count)]


def raw(sources: list[ReplicaID], floats: dict[str, float], at_s: float) -> dict[str, dict[ReplicaID, list[Any]]]:
    return {name: {source: [TimeStampedValue(at_s, value)] for source in sources} for name, value in floats.items()}


def policies() -> tuple[Any, Any]:
    """Return both policies as Serve gets them: pickled by value, unpickled, wrapped."""
    made = (AutoscalingPolicy(policy_function=name).get_policy() for name in (INGRESS_POLICY, REPLICA_POLICY))
    ingress, replica = map(_apply_autoscaling_config, made)
    return ingress, replica


def test_both_meet_on_the_board_and_the_number_follows() -> None:
    """A backlog too large for two replicas adds more; Serve's wrapper passes the number on at once."""
    ingress, replica = policies()
    target, arrived = 2, REPLICA.arrived_tokens
    for second in range(120):
        clock.now_s += 1.0
        arrived += 2 * 30_000
        ingress(Context(1, raw(ids(1), INGRESS.to_floats(), second), ids(1)))
        figures = {**REPLICA.to_floats(), "arrived_tokens": arrived}
        target, _ = replica(Context(target, raw(ids(2), figures, second), ids(2)))
    assert target == 8


def test_a_restarted_controller_keeps_the_number() -> None:
    """The first calls have no replica, no report and no state; then reports arrive one by one."""
    ingress, replica = policies()
    for seen in (0, 0, 1, 2, 3, 3, 3):
        clock.now_s += CONTROL_PERIOD_S
        idle = raw(ids(seen), {**REPLICA.to_floats(), "queued_tokens": 0.0}, clock.now_s)
        ingress(Context(1, raw(ids(1 if seen else 0), INGRESS.to_floats(), clock.now_s), ids(1)))
        assert replica(Context(3, idle, ids(3 if seen else 0)))[0] == 3


def test_reports_that_stand_still_hold_the_number() -> None:
    """A busy moment's old figures neither grow nor shrink anything, whichever time other machines' clocks show."""
    ingress, replica = policies()
    busy = {**REPLICA.to_floats(), "queued_tokens": 1e9}
    for _ in range(30):
        clock.now_s += CONTROL_PERIOD_S
        ingress(Context(1, raw(ids(1), INGRESS.to_floats(), clock.now_s), ids(1)))
        replica(Context(3, raw(ids(3), busy, 1e9), ids(3)))
    assert replica(Context(3, raw(ids(3), busy, 1e9), ids(3)))[0] == 3


def test_a_policy_that_faults_changes_nothing_and_raises_nothing() -> None:
    """While a policy raises, Serve's application manager stands still for all applications. (docs: autoscaling)"""
    for policy in policies():
        clock.now_s += CONTROL_PERIOD_S
        assert policy(Context(5, object(), ids(5)))[0] == 5
        assert policy(Context(5, None, ids(5)))[0] == 5


def test_between_two_control_periods_nothing_is_decided() -> None:
    """Serve asks ten times a second."""
    ingress, replica = policies()
    clock.now_s += 100.0
    assert replica(Context(3, {}, ids(3)))[0] == 3
    ingress(Context(1, raw(ids(1), {**INGRESS.to_floats(), "min_replicas": 6.0}, 1.0), ids(1)))
    assert replica(Context(3, raw(ids(3), REPLICA.to_floats(), 1.0), ids(3)))[0] == 3
    clock.now_s += CONTROL_PERIOD_S
    assert replica(Context(3, raw(ids(3), REPLICA.to_floats(), 2.0), ids(3)))[0] == 6


def test_each_of_several_models_follows_its_own_figures_and_one_at_zero_its_waiting_requests() -> None:
    """The ingress reports of all in one; a board of one reads those with its name."""
    ingress, replica = policies()
    (source,) = ids(1)

    def told(waiting: float) -> dict[str, float]:
        one = replace(INGRESS, min_replicas=0.0, waiting_requests=waiting)
        two = replace(INGRESS, min_replicas=2.0, waiting_requests=0.0)
        named = (("Replica-one", one), ("Replica-two", two))
        return {f"{name}:{key}": value for name, figures in named for key, value in figures.to_floats().items()}

    def targets() -> list[int]:
        clock.now_s += CONTROL_PERIOD_S
        contexts = (
            Context(0, {}, deployment_name=name, total_num_requests=0.0) for name in ("Replica-one", "Replica-two")
        )
        return [replica(context)[0] for context in contexts]

    ingress(Context(1, raw([source], told(0.0), clock.now_s), [source], deployment_name="Ingress"))
    assert targets() == [0, 2]
    ingress(Context(1, raw([source], told(1.0), clock.now_s), [source], deployment_name="Ingress"))
    assert targets() == [1, 2]
