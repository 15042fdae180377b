"""Replicas with broken feeds: reports that arrive by another path do not count as news of a feed, and do not last."""

from router.core import RoutingCore
from router.known_replicas import SILENT_S
from router.protocol.block_hash import HASH_BYTES
from router.protocol.events import BlocksStored, CacheCleared, LoadReport
from router.protocol.request import Decision, RoutedRequest
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
        self.core = RoutingCore("me", clock=lambda: self.now_s)
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
    assert case.decide("b").queued_tokens is not None
    case.now_s += SILENT_S
    case.tell("b")
    silent, other = case.decide("b"), case.decide("a")
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
        asked = case.decide("b")
        assert asked.replica_id == "a"
        case.core.rerouted(asked, load(1000, case.now_s))
        case.now_s += SILENT_S / 5
    assert case.decide("b").selected_cached_tokens == 0
    assert case.core.directory.match(CHAIN) == {}


def test_a_feed_that_is_cut_off_is_not_believed_until_a_snapshot_comes() -> None:
    """Meanwhile the replica gets its share by load, and cached tokens in its answers are believed. (docs: failures)"""
    case = Case()
    core = case.core
    case.tell("a", 500_000)
    case.now_s += SILENT_S
    case.tell("b")
    case.decide("a")  # only decisions check the time
    assert (core.directory.match(CHAIN), core.loads.queue_ahead("a")) == ({}, 0)
    cold = [RoutedRequest(f"q{n}", b"", 65, bytes([n]) * 16) for n in range(40)]
    chosen = {decision.replica_id for request in cold if (decision := core.decide(request)) is not None}
    assert {"a", "b"} <= chosen
    core.record_delivered(case.decide("b", "c"), 64, 0.1, CHAIN)
    assert core.directory.match(CHAIN) == {"a": 64}
    core.apply("a", [CacheCleared(), BlocksStored(CHAIN[:HASH_BYTES]), load(500_000, case.now_s)])
    assert core.directory.match(CHAIN) == {"a": 16}
    assert core.loads.queue_ahead("a") >= 500_000


def test_a_replica_that_reports_and_one_that_never_had_a_feed_are_not_silent() -> None:
    """Events without a feed (in simulations) are believed until a feed replaces them."""
    case = Case()
    case.core = RoutingCore("me", clock=lambda: case.now_s)
    case.core.update_replicas("abc")
    case.core.apply("a", [BlocksStored(CHAIN), load(0, 0.0)])
    for is_live in (None, lambda replica_id: True):
        if is_live is not None:
            case.core.follow(is_live)
        case.now_s += 1000.0
        case.decide()
        assert case.core.directory.match(CHAIN) == {"a": 64}
