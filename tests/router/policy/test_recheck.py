"""A replica checks a decision again: it sends a request back only for work that the router could not know."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core import RoutingCore
from router.policies import MAX_REROUTES, WORTH_ASKING_S, is_outdated
from router.protocol.events import LoadReport
from router.protocol.request import Decision, RoutedRequest
from router.settings import DEFAULT_POLICY, POLICY_NAMES
from tests.router import cores
from tests.router.cores import ask, core_of, decided

RATE = 1000.0
TOKENS = st.integers(0, 1 << 30)


def load(queued: int, taken_at_s: float = 0.0, **admitted: int) -> LoadReport:
    return cores.load(queued, 0, int(queued > 0), admitted=admitted, taken_at_s=taken_at_s)


def decision(queued: int | None, work_s: float = 0.0) -> Decision:
    return Decision("a", "me", 1, 0, 0, "cold", work_s, queued_tokens=queued)


def request(number: int, rerouted: int = 0) -> RoutedRequest:
    return ask(number, b"", 1000, number.to_bytes(16), rerouted=rerouted)


def beside(*names: str, policy: str = DEFAULT_POLICY, replicas: str = "rs") -> list[RoutingCore]:
    """Return routers that know of each other through the replicas' reports."""
    reports = dict.fromkeys(replicas, load(0, **dict.fromkeys(names, 1)))
    return [core_of(reports, clock=lambda: 1.0, name=name, policy=policy) for name in names]


@given(queued=TOKENS, believed=TOKENS, work_s=st.floats(0, 1e6))
def test_a_replica_with_no_more_work_than_believed_takes_the_request(queued: int, believed: int, work_s: float) -> None:
    """Less work, or little more, is no reason to ask again; a longer estimate tolerates more extra work."""
    chosen = decision(believed, work_s)
    rerouted = is_outdated(chosen, load(queued))
    if queued <= believed + WORTH_ASKING_S * RATE:
        assert not rerouted
    if rerouted:
        assert is_outdated(chosen, load(queued + 1))
        assert is_outdated(decision(believed, work_s / 2), load(queued))
    assert not is_outdated(decision(None), load(queued))
    assert not is_outdated(decision(queued), load(queued))
    assert is_outdated(decision(believed), load(believed + 1000))


def test_a_second_router_learns_of_the_first_routers_request() -> None:
    """Two blind routers choose one replica; it returns the second request, which goes to the other. (docs: routing)"""
    first, second = beside("first", "second")
    one = decided(first, request(7))
    other = decided(second, request(7))
    assert one.replica_id == other.replica_id
    assert not is_outdated(one, load(0))
    now = load(1000, 1.0, first=one.reservation)
    assert is_outdated(other, now)
    second.rerouted(other, now)
    assert second.loads.open_reservations == 0
    assert second.loads.queue_ahead(one.replica_id) == 1000
    again = decided(second, request(7, rerouted=1))
    assert again.replica_id != one.replica_id
    assert not is_outdated(again, load(0))


def test_a_decision_made_with_the_reported_load_is_followed() -> None:
    """If the replica is still the best, it takes the request the second time: the router believes its report."""
    core, _ = beside("me", "you")
    core.apply("r", [load(50_000, taken_at_s=0.5)])
    chosen = decided(core, request(1))
    assert chosen.replica_id == "s"
    now = load(20_000, taken_at_s=1.0)
    assert is_outdated(chosen, now)
    core.rerouted(chosen, now)
    core.apply("s", [load(0, taken_at_s=0.9)])  # a report from before, still in transit
    again = decided(core, request(1, rerouted=1))
    assert (again.replica_id, again.queued_tokens) == ("s", 20_000)
    assert not is_outdated(again, now)


def test_a_request_is_rerouted_so_often_and_counted_once() -> None:
    core, _ = beside("me", "you")
    for rerouted in range(MAX_REROUTES):
        chosen = decided(core, request(1, rerouted))
        assert chosen.queued_tokens is not None
        core.rerouted(chosen, load(chosen.queued_tokens + 1000, taken_at_s=float(rerouted)))
    last = decided(core, request(1, MAX_REROUTES))
    assert last.queued_tokens is None
    core.release(last)
    reasons = core.counters.by_policy[DEFAULT_POLICY].by_reason.values()
    assert sum(counted.decisions for counted in reasons) == 1
    assert core.counters.rerouted == MAX_REROUTES
    assert core.loads.open_reservations == 0


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_only_the_default_policy_beside_others_asks_for_a_second_look(policy: str) -> None:
    """A lone router sees everything, one replica is no choice, and other rules ignore work. (docs: routing)"""
    alone, among = beside("me", policy=policy)[0], beside("me", "you", policy=policy)[0]
    only = beside("me", "you", policy=policy, replicas="r")[0]
    for core, expected in ((alone, False), (only, False), (among, policy == DEFAULT_POLICY)):
        assert (decided(core, request(1)).queued_tokens is not None) is expected
