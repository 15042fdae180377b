"""The feed's thread survives events that it cannot publish, holds a bounded number of them, and reports a failure."""

from collections.abc import Iterator, Sequence
from threading import Event as Signal

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from router.feed.publisher import MAX_WAITING_BATCHES, UNHEALTHY_AFTER_S, FeedPublisher
from router.feed.sequencing import NONCE_BYTES
from router.protocol.block_hash import HASH_BYTES
from router.protocol.events import BlocksStored, Event

PATIENCE_S = 20.0


def stored(number: int) -> BlocksStored:
    return BlocksStored(number.to_bytes(HASH_BYTES, "big"))


class Feed(FeedPublisher):
    """Raises while ``broken``, and records published events; unset ``free`` blocks a call. Its clock stands still."""

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__("replica", clock=lambda: self.now_s)
        self.broken = False
        self.published: list[Event] = []
        self.called, self.free = Signal(), Signal()
        self.free.set()
        self._encode = self._sequencer.publish
        setattr(self._sequencer, "publish", self._encode_slowly)  # noqa: B010 (a method)
        self.start()

    def _encode_slowly(self, events: Sequence[Event]) -> list[bytes]:
        broken = self.broken  # read at the start of the call: a test changes it once it has seen the call
        self.called.set()
        assert self.free.wait(PATIENCE_S)
        if broken:
            raise ValueError("an event that cannot be encoded")
        self.published += events
        return self._encode(events)

    def put_and_wait(self, *events: Event) -> None:
        """Put events, and wait until they are about to be published."""
        self.called.clear()
        self.put(events)
        assert self.called.wait(PATIENCE_S)


@pytest.fixture
def feed() -> Iterator[Feed]:
    made = Feed()
    yield made
    made.free.set()
    made.stop()


def test_an_event_that_cannot_be_published_ends_nothing(feed: Feed) -> None:
    """Later events are published, and the loss makes the engine announce its caches again."""
    feed.broken = True
    feed.put_and_wait(stored(1))
    feed.put_and_wait(stored(2))  # the first call ends before the second one begins
    assert feed.mirror_drifts >= 1
    feed.broken = False
    feed.put_and_wait(stored(3))
    feed.stop()
    assert feed.published == [stored(3)]
    assert feed.mirror_drifts == 2


def test_a_feed_that_publishes_nothing_is_not_healthy(feed: Feed) -> None:
    feed.broken = True
    feed.put_and_wait(stored(1))
    feed.now_s = UNHEALTHY_AFTER_S
    assert feed.healthy()
    feed.now_s += 1
    assert not feed.healthy()
    feed.broken = False
    feed.put_and_wait(stored(2))
    feed.put_and_wait(stored(3))  # ends the second call
    feed.now_s += UNHEALTHY_AFTER_S
    assert feed.healthy()


def test_a_feed_with_nothing_to_publish_is_healthy(feed: Feed) -> None:
    feed.put_and_wait(stored(1))
    feed.put_and_wait(stored(2))
    feed.stop()
    feed.now_s = 1e6
    assert feed.mirror_drifts == 0
    assert not feed.healthy(), "its thread has ended"


def test_events_queued_for_a_blocked_thread_are_bounded(feed: Feed) -> None:
    most = MAX_WAITING_BATCHES
    feed.free.clear()
    feed.put_and_wait(stored(0))
    waiting: list[Sequence[Event]] = [(stored(number),) for number in range(1, 2 * most + 3)]
    for events in waiting:
        feed.put(events)
    assert len(feed._waiting) <= most
    assert feed.mirror_drifts == 2
    feed.free.set()
    feed.stop()
    assert feed.published == [stored(0), stored(2 * most + 1), stored(2 * most + 2)]


class SlowAsker:
    """A ROUTER socket whose asker has no room every other time. ``requests``: to come; ``sent``: what it got."""

    def __init__(self, requests: list[bytes]) -> None:
        self.requests = requests
        self.sent: list[bytes] = []
        self._room = True

    def recv_multipart(self, flags: int) -> list[bytes]:
        if not self.requests:
            raise zmq.Again
        return [b"asker", self.requests.pop(0)]

    def send_multipart(self, frames: list[bytes], flags: int) -> None:
        self._room = not self._room
        if self._room:
            raise zmq.Again
        self.sent.append(frames[1])


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6))
def test_a_new_request_gets_nothing_of_an_earlier_one(turns: list[int]) -> None:
    """A slow asker asks anew in the middle of a snapshot, ever again; each answer is whole or its beginning."""
    feed = FeedPublisher("replica")
    try:
        feed._sequencer.publish([BlocksStored(number.to_bytes(HASH_BYTES, "big") * 200) for number in range(40)])
        router = SlowAsker([])
        feed._router = router  # type: ignore[assignment]
        for number, count in enumerate(turns):
            nonce = bytes([number]) * NONCE_BYTES
            whole = list(feed._sequencer.snapshot(nonce))
            router.requests, router.sent = [nonce], []
            for _ in range(count + 1):
                feed._answer()
            assert router.sent == whole[: len(router.sent)]
        while feed._answer():
            pass
        assert router.sent == whole
    finally:
        feed._router = feed._context.socket(zmq.ROUTER)
        feed.stop()
