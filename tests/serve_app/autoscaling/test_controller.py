"""The policies as Ray Serve's controller calls them, inside Serve's own wrapper; no cluster runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingPolicy

from serve_app.app import INGRESS_POLICY, REPLICA_POLICY, _autoscaling
from serve_app.autoscaling import board
from serve_app.autoscaling.policy import CONTROL_PERIOD_S
from tests.serve_app.autoscaling.test_signals import INGRESS, REPLICA

DEPLOYMENT = DeploymentID(name="Replica", app_name="app")


class Clock:
    now_s = 0.0


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time that the test moves, no Ray to tell, and a board of its own."""
    monkeypatch.setattr("time.monotonic", lambda: Clock.now_s)
    monkeypatch.setattr(board, "_boards", {})
    monkeypatch.setattr(board, "post", lambda *_: None)


@dataclass
class Context:
    """What Serve gives to a policy, as far as ours and Serve's wrapper look at it."""

    target_num_replicas: int
    raw_metrics: Any
    running_replicas: list[ReplicaID] = field(default_factory=list)
    app_name: str = "app"
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
    """Both policies as Serve gets them: pickled by value, unpickled, wrapped."""
    made = (AutoscalingPolicy(policy_function=name).get_policy() for name in (INGRESS_POLICY, REPLICA_POLICY))
    ingress, replica = map(_apply_autoscaling_config, made)
    return ingress, replica


def test_both_meet_on_the_board_and_the_number_follows() -> None:
    """A backlog that two replicas cannot carry makes them more; Serve's wrapper lets the number through at once."""
    ingress, replica = policies()
    target, arrived = 2, REPLICA.arrived_tokens
    for second in range(120):
        Clock.now_s += 1.0
        arrived += 2 * 30_000
        ingress(Context(1, raw(ids(1), INGRESS.to_floats(), second), ids(1)))
        figures = {**REPLICA.to_floats(), "arrived_tokens": arrived}
        target, _ = replica(Context(target, raw(ids(2), figures, second), ids(2)))
    assert target == 8


def test_a_restarted_controller_keeps_the_number() -> None:
    """The first calls see no replica, no report and no state; then reports come one by one."""
    ingress, replica = policies()
    for seen in (0, 0, 1, 2, 3, 3, 3):
        Clock.now_s += CONTROL_PERIOD_S
        idle = raw(ids(seen), {**REPLICA.to_floats(), "queued_tokens": 0.0}, Clock.now_s)
        ingress(Context(1, raw(ids(1 if seen else 0), INGRESS.to_floats(), Clock.now_s), ids(1)))
        assert replica(Context(3, idle, ids(3 if seen else 0)))[0] == 3


def test_reports_that_stand_still_hold_the_number() -> None:
    """Old figures of a busy moment neither grow nor shrink anything, whatever the clocks of other machines say."""
    ingress, replica = policies()
    busy = {**REPLICA.to_floats(), "queued_tokens": 1e9}
    for _ in range(30):
        Clock.now_s += CONTROL_PERIOD_S
        ingress(Context(1, raw(ids(1), INGRESS.to_floats(), Clock.now_s), ids(1)))
        replica(Context(3, raw(ids(3), busy, 1e9), ids(3)))
    assert replica(Context(3, raw(ids(3), busy, 1e9), ids(3)))[0] == 3


class Broken:
    """Figures that cannot even be looked at."""

    def items(self) -> Any:
        raise RuntimeError("broken")

    def __bool__(self) -> bool:
        return True


def test_a_policy_that_faults_changes_nothing_and_raises_nothing() -> None:
    """Serve's application manager stands still for all applications while a policy raises. (docs/autoscaling.md)"""
    for policy in policies():
        Clock.now_s += CONTROL_PERIOD_S
        assert policy(Context(5, Broken(), ids(5)))[0] == 5
        assert policy(Context(5, None, ids(5)))[0] == 5


def test_between_two_control_periods_nothing_is_decided() -> None:
    """Serve asks ten times a second."""
    ingress, replica = policies()
    Clock.now_s += 100.0
    assert replica(Context(3, {}, ids(3)))[0] == 3
    ingress(Context(1, raw(ids(1), {**INGRESS.to_floats(), "min_replicas": 6.0}, 1.0), ids(1)))
    assert replica(Context(3, raw(ids(3), REPLICA.to_floats(), 1.0), ids(3)))[0] == 3
    Clock.now_s += CONTROL_PERIOD_S
    assert replica(Context(3, raw(ids(3), REPLICA.to_floats(), 2.0), ids(3)))[0] == 6
