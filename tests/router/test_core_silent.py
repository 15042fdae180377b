"""Replicas with broken feeds: reports that arrive by another path do not count as news of a feed, and do not last."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core import RoutingCore
from router.known_replicas import SILENT_S
from router.policies import POLICIES
from router.protocol.block_hash import HASH_BYTES
from router.protocol.events import BlocksStored, CacheCleared, LoadReport
from router.protocol.request import Decision, RoutedRequest
from router.settings import RouterSettings
from tests.router import cores
from tests.router.cores import ask, decided

CHAIN = bytes(range(4 * HASH_BYTES))
ADMITTED = {"me": 1, "you": 1}


def load(queued_tokens: int, taken_at_s: float) -> LoadReport:
    return cores.load(queued_tokens, 0, int(queued_tokens > 0), admitted=ADMITTED, taken_at_s=taken_at_s)


class Case:
    """A router beside another one, with feeds that are silent unless ``tell`` is called.

    Replica "a" has the prompt, "b" has nothing to do, and "c" is busy, so that there is a choice.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.core = RoutingCore("me", RouterSettings(block_size=16), clock=lambda: self.now_s)
        self.core.follow(lambda replica_id: False)
        self.core.update_replicas("abc")
        for name in "ab":
            self.tell(name)
        self.core.apply("a", [BlocksStored(CHAIN)])

    def tell(self, name: str, queued_tokens: int = 0) -> None:
        self.core.apply(name, [load(queued_tokens, self.now_s)])

    def decide(self, *blocked: str) -> Decision:
        self.tell("c", 1_000_000)
        return decided(self.core, ask(chain=CHAIN), blocked)


def test_a_silent_replica_is_never_asked_for_a_second_look() -> None:
    """Its answer would be believed forever; from its next message on it is asked again."""
    case = Case()
    case.core.update_replicas("abcd")  # "d" is full, but reports: else the silent one would be the only choice
    assert case.decide("b").queued_tokens is not None
    case.now_s += SILENT_S
    case.tell("b")
    case.core.apply("d", [cores.load(1, 0, 16)])
    silent, other = case.decide("b", "c"), case.decide("a")
    assert (silent.replica_id, silent.queued_tokens) == ("a", None)
    assert other.replica_id == "b" and other.queued_tokens is not None
    case.tell("a")
    assert case.decide("b").queued_tokens is not None


def test_a_report_is_not_believed_once_the_replica_is_silent() -> None:
    """A request may be in flight while the replica's feed falls silent, and come back with a load."""
    case = Case()
    asked = case.decide("b")
    case.now_s += SILENT_S
    case.core.release(case.decide("a"))  # only decisions check the time
    case.core.rerouted(asked, load(1_000_000, case.now_s))
    assert case.core.loads.queue_ahead("a") == 0
    assert (case.core.counters.rerouted, case.core.loads.open_reservations) == (1, 0)


def test_requests_that_come_back_do_not_hide_that_a_feed_is_silent() -> None:
    """The feed's view of the replica's cache is old, even if returned requests report new loads."""
    case = Case()
    for _ in range(6):
        asked = case.decide("b", "c")
        assert asked.replica_id == "a"
        case.core.rerouted(asked, load(1000, case.now_s))
        case.now_s += SILENT_S / 5
    assert case.decide("b").selected_cached_tokens == 0
    assert case.core.directory.match(CHAIN) == {}


def test_a_feed_that_is_cut_off_is_not_believed_until_a_snapshot_comes() -> None:
    """Meanwhile the replica gets what no other can take, and cached tokens in its answers are believed.

    docs: failures
    """
    case = Case()
    core = case.core
    case.tell("a", 500_000)
    case.now_s += SILENT_S
    case.tell("b")
    case.decide("a")  # only decisions check the time
    assert (core.directory.match(CHAIN), core.loads.queue_ahead("a")) == ({}, 0)
    cold = [RoutedRequest(f"q{n}", b"", 65, bytes([n]) * 16) for n in range(60)]
    chosen = [decision.replica_id for request in cold if (decision := core.decide(request)) is not None]
    assert "a" not in chosen[:40] and chosen[-1] == "a", "the others are full in the end"
    core.record_delivered(case.decide("b", "c"), 64, 0.1, CHAIN)
    assert core.directory.match(CHAIN) == {"a": 64}
    core.apply("a", [CacheCleared(), BlocksStored(CHAIN[:HASH_BYTES]), load(500_000, case.now_s)])
    assert core.directory.match(CHAIN) == {"a": 16}
    assert core.loads.queue_ahead("a") >= 500_000


def test_a_replica_that_reports_and_one_that_never_had_a_feed_are_not_silent() -> None:
    """Events without a feed (in simulations) are believed until a feed replaces them."""
    case = Case()
    case.core = RoutingCore("me", RouterSettings(block_size=16), clock=lambda: case.now_s)
    case.core.update_replicas("abc")
    case.core.apply("a", [BlocksStored(CHAIN), load(0, 0.0)])
    for is_live in (None, lambda replica_id: True):
        if is_live is not None:
            case.core.follow(is_live)
        case.now_s += 1000.0
        case.decide()
        assert case.core.directory.match(CHAIN) == {"a": 64}


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=40)
@given(data=st.data())
def test_a_frozen_replica_gets_requests_only_when_no_other_can_take_them(policy: str, data: st.DataObject) -> None:
    """Sockets stay open and its last report was good, so its feed looks complete. In any policy, with any load.

    Where every feed is quiet, this router does not hear, and the replicas are equal. docs: failures
    """
    names = "abcde"
    now_s = 0.0
    core = RoutingCore("me", RouterSettings(policy=policy), clock=lambda: now_s)
    core.follow(lambda replica_id: True)
    core.update_replicas(names)
    waits = {name: data.draw(st.integers(0, 16), label=name) for name in names}
    held = data.draw(st.sampled_from(names), label="held")

    def tell(name: str) -> None:
        core.apply(name, [cores.load(100 * waits[name], 8, waits[name], taken_at_s=now_s)])

    for name in names:
        tell(name)
    core.apply(held, [BlocksStored(CHAIN)])
    frozen = data.draw(st.sets(st.sampled_from(names)), label="frozen")
    for _ in range(4):
        now_s += 1.0
        for name in names:
            if name not in frozen:
                tell(name)
    able = {name for name in names if waits[name] < 16}
    unkeyed, chosen = core.decide_unkeyed(), core.decide(ask(chain=CHAIN))
    assert (chosen is None) == (unkeyed is None) == (not able)
    if chosen is not None:
        best = (able - frozen) or able
        assert {chosen.replica_id, unkeyed} <= best
        assert chosen.pull_from not in frozen or len(frozen) == len(names)
    for name in names:
        tell(name)
    core.release(chosen) if chosen is not None else None
    assert core._replicas.quiet == frozenset(), "its next message is enough"
