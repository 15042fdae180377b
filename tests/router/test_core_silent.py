"""Replicas whose feeds are cut off: what they tell beside their feeds is no news of a feed, and nothing stays of it."""

from __future__ import annotations

from router.core import RoutingCore
from router.load.silent_feeds import SILENT_S
from router.protocol.block_hash import HASH_BYTES
from router.protocol.events import BlocksStored, LoadReport, RouterShare
from router.protocol.request import Decision, RoutedRequest

CHAIN = bytes(range(HASH_BYTES)) * 4
SHARES = (RouterShare("me", 1, 0), RouterShare("you", 1, 0))


def load(queued_tokens: int, taken_at_s: float) -> LoadReport:
    return LoadReport(queued_tokens, 0, int(queued_tokens > 0), 0, 0, 1000.0, 0.01, SHARES, taken_at_s=taken_at_s)


class Case:
    """A router beside another one, and feeds that tell nothing any more unless ``tell`` is called.

    Replica "a" has the prompt, "b" has nothing to do, and "c" is busy, so that there is a choice.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.core = RoutingCore("me", clock=lambda: self.now_s)
        self.core.follow(lambda replica_id: False)
        self.core.update_replicas("abc")
        for name in "ab":
            self.tell(name)
        self.core.apply("a", "e", [BlocksStored(CHAIN)])

    def tell(self, name: str, queued_tokens: int = 0) -> None:
        self.core.apply(name, "e", [load(queued_tokens, self.now_s)])

    def decide(self, *blocked: str) -> Decision:
        self.tell("c", 1_000_000)
        decision = self.core.decide(RoutedRequest("q", CHAIN, 4 * 16 + 1, CHAIN[:HASH_BYTES]), blocked)
        assert decision is not None
        return decision


def test_a_silent_replica_is_never_asked_for_a_second_look() -> None:
    """Its answer would be believed for ever; from its next message on it is asked again."""
    case = Case()
    assert case.decide("b").queued_tokens is not None
    case.now_s += SILENT_S
    case.tell("b")
    silent, other = case.decide("b"), case.decide("a")
    assert (silent.replica_id, silent.queued_tokens) == ("a", None)
    assert other.replica_id == "b" and other.queued_tokens is not None
    case.tell("a")
    assert case.decide("b").queued_tokens is not None


def test_what_a_replica_told_is_not_believed_once_it_is_silent() -> None:
    """A request may be under way while the replica's feed falls silent, and come back with a load."""
    case = Case()
    asked = case.decide("b")
    case.now_s += SILENT_S
    case.core.release(case.decide("a"))  # only decisions look at the time
    case.core.rerouted(asked, load(1_000_000, case.now_s))
    assert case.core.loads.queue_ahead("a") == 0
    assert (case.core.counters.rerouted, case.core.loads.open_reservations) == (1, 0)


def test_requests_that_come_back_do_not_hide_that_a_feed_is_silent() -> None:
    """What the feed told of the replica's cache is old, however often the replica tells its load."""
    case = Case()
    for _ in range(6):
        asked = case.decide("b")
        assert asked.replica_id == "a"
        case.core.rerouted(asked, load(1000, case.now_s))
        case.now_s += SILENT_S / 5
    assert case.decide("b").selected_cached_tokens == 0
    assert case.core.directory.match(CHAIN) == {}
