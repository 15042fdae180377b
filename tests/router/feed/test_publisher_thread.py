"""The feed's thread outlives what it cannot publish, holds a bounded number of events, and tells that it is broken."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from threading import Event as Signal

import pytest

from router.feed import publisher as module
from router.feed.publisher import UNHEALTHY_AFTER_S, FeedPublisher, FeedPublisherThread
from router.protocol.block_hash import HASH_BYTES
from router.protocol.events import BlocksStored, Event

PATIENCE_S = 20.0


def stored(number: int) -> BlocksStored:
    return BlocksStored(number.to_bytes(HASH_BYTES, "big"))


class Faulty(FeedPublisher):
    """A real publisher that raises while ``broken``, and keeps what it published; ``block`` holds it in a call."""

    def __init__(self) -> None:
        super().__init__("replica")
        self.broken = False
        self.published: list[Event] = []
        self.called, self.free = Signal(), Signal()
        self.free.set()

    def publish(self, events: Iterable[Event]) -> None:
        broken = self.broken  # as it was when the call began: a test changes it once it has seen the call
        self.called.set()
        assert self.free.wait(PATIENCE_S)
        if broken:
            raise ValueError("an event that cannot be encoded")
        super().publish(events := list(events))
        self.published += events


class Feed:
    """The thread under test, with a clock that stands still."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.publisher = Faulty()
        self.thread = FeedPublisherThread(self.publisher, clock=lambda: self.now_s)
        self.thread.start()

    def put(self, *events: Event) -> None:
        """Put events, and wait until the publisher was called with them."""
        self.publisher.called.clear()
        self.thread.put(events)
        assert self.publisher.called.wait(PATIENCE_S)


@pytest.fixture
def feed() -> Iterator[Feed]:
    made = Feed()
    yield made
    made.publisher.free.set()
    made.thread.stop()


def test_an_event_that_cannot_be_published_ends_nothing(feed: Feed) -> None:
    """What comes after it is published, and the loss makes the caches be announced anew."""
    feed.publisher.broken = True
    feed.put(stored(1))
    feed.put(stored(2))  # the first call is over when the second one comes
    assert feed.thread.mirror_drifts >= 1
    feed.publisher.broken = False
    feed.put(stored(3))
    feed.thread.stop()
    assert feed.publisher.published == [stored(3)]
    assert feed.thread.mirror_drifts == 2


def test_a_feed_that_publishes_nothing_is_not_healthy(feed: Feed) -> None:
    feed.publisher.broken = True
    feed.put(stored(1))
    feed.now_s = UNHEALTHY_AFTER_S
    assert feed.thread.healthy()
    feed.now_s += 1
    assert not feed.thread.healthy()
    feed.publisher.broken = False
    feed.put(stored(2))
    feed.put(stored(3))  # the second call is over
    feed.now_s += UNHEALTHY_AFTER_S
    assert feed.thread.healthy()


def test_a_feed_with_nothing_to_publish_is_healthy(feed: Feed) -> None:
    feed.put(stored(1))
    feed.put(stored(2))
    feed.thread.stop()
    feed.now_s = 1e6
    assert feed.thread.mirror_drifts == 0
    assert not feed.thread.healthy(), "its thread has ended"


def test_what_waits_for_a_thread_that_stands_still_is_bounded(feed: Feed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is held without a bound; the loss makes the caches be announced anew."""
    monkeypatch.setattr(module, "MAX_WAITING_BATCHES", 5)
    feed.publisher.free.clear()
    feed.put(stored(0))
    waiting: list[Sequence[Event]] = [(stored(number),) for number in range(1, 13)]
    for events in waiting:
        feed.thread.put(events)
    assert len(feed.thread._events) <= 5
    assert feed.thread.mirror_drifts == 2
    feed.publisher.free.set()
    feed.thread.stop()
    assert feed.publisher.published == [stored(0), stored(11), stored(12)]
