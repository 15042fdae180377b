"""CacheAwareRouter in real Ray Serve, in both of its loop modes: an application in each, with processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import START

pytestmark = pytest.mark.integration

PROGRAM = Path(__file__).with_name("request_router_app.py")


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, object]]:
    """What the little applications saw, by mode."""
    root = PROGRAM.parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    with START:
        done = subprocess.run(
            [sys.executable, str(PROGRAM)], env=environment, cwd=root, capture_output=True, text=True, timeout=600
        )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    parsed: dict[str, dict[str, object]] = json.loads(done.stdout.strip().splitlines()[-1])
    return parsed


@pytest.fixture(params=["default", "throughput_optimized"])
def outcome(request: pytest.FixtureRequest, outcomes: dict[str, dict[str, object]]) -> dict[str, object]:
    """What the application of one mode saw."""
    found = outcomes[request.param]
    assert found["router_in_separate_loop"] is (request.param == "default")
    return found


def test_every_concurrent_request_reaches_the_predicted_replica(outcome: dict[str, object]) -> None:
    """300 requests sent at once each reach the replica that holds their prefix."""
    assert outcome["sent"] == 300
    assert outcome["right"] == 300, outcome


def test_the_replica_sees_the_decision_that_the_ingress_can_take(outcome: dict[str, object]) -> None:
    """The reservation in the replica's hands is the one the ingress finds under the request's id."""
    assert outcome["same_decision"] == 300


def test_concurrent_calls_inside_one_parent_request_all_finish(outcome: dict[str, object]) -> None:
    """Handle calls that share their parent's internal request id do not wait for each other."""
    assert outcome["nested"] == 16


def test_calls_without_a_route_are_served(outcome: dict[str, object]) -> None:
    """Control calls that carry no prompt reach some replica."""
    assert outcome["unkeyed"] == 8


def test_no_fault_and_no_reservation_is_left(outcome: dict[str, object]) -> None:
    """Nothing fell back, and every reservation was released."""
    assert outcome["faults"] == 0
    assert outcome["open_reservations"] == 0


def test_calls_end_with_their_callers(outcome: dict[str, object]) -> None:
    """Of two thousand callers that leave in bursts, most of them while a replica is chosen, none leaves a call."""
    assert (outcome["left"], outcome["still_running"]) == (2000, 0)


def test_without_replicas_every_request_is_told_so(outcome: dict[str, object]) -> None:
    """With all replicas killed and none starting nothing hangs; once they start, requests are served again."""
    assert outcome["refused"] == ["NoReplicaLeft"] * 20
    assert outcome["served_again"] is True
    assert outcome["left_behind"] == 0
