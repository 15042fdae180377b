"""FeedSequencer, a line, FeedResequencer, without sockets. That nothing is lost on the way is in ``test_drift``."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from router.feed.resequencer import ResequencerSettings
from router.feed.sequencer import FeedSequencer
from router.protocol.events import BlocksStored
from tests.router.feed.feed_line import LOAD, NUMBERS, Replica


def test_disorder_needs_no_snapshot_and_a_gap_asks_for_one() -> None:
    """Messages out of order are put in order, repeated ones change nothing; a lost one is noticed at the next."""
    line = Replica()
    line.settle()
    counters = line.core.counters.feed
    snapshots = counters.snapshots
    messages = [line.does([event])[0] for event in (("store", "pool", [1]), ("remove", "pool", [1]), "load")]
    line.hears([messages[index] for index in (2, 1, 1, 0, 0, 2)])
    assert line.resequencer.live
    assert line.resequencer.poll(line.now_s) is None
    assert line.known() == line.held
    assert counters.snapshots == snapshots
    gaps = counters.gaps
    line.does([("store", "pool", [1])])  # lost
    for number in (2, 3):
        line.hears(line.does([("store", "pool", [number])]))
    assert counters.gaps == gaps + 1
    assert not line.resequencer.live
    assert not line.known()["pool"]
    line.settle()
    assert line.known() == line.held


def test_unanswered_requests_back_off() -> None:
    """A dead publisher is asked ever more rarely, at most once in ``last_backoff_s``."""
    line = Replica(feed=ResequencerSettings(timeout_s=0.5, first_backoff_s=0.1, last_backoff_s=4.0))
    asked = [now / 100 for now in range(6000) if line.resequencer.poll(now / 100) is not None]
    pauses = [after - before for before, after in pairwise(asked)]
    assert pauses[0] < 1.0 < 4.0 <= pauses[-1]
    assert len(asked) < 20


def test_a_request_that_could_not_be_sent_is_not_waited_for() -> None:
    """The backoff alone sets when the next one goes out."""
    line = Replica(feed=ResequencerSettings(timeout_s=3600.0, first_backoff_s=0.1))
    assert line.resequencer.poll(0.0) is not None
    line.resequencer.request_unsent()
    assert line.resequencer.poll(0.05) is None
    assert line.resequencer.poll(0.21) is not None
    assert line.resequencer.poll(100.0) is None


def test_buffer_is_bounded_while_no_snapshot_comes() -> None:
    """Memory held for a feed without its snapshot stays within the settings; load reports flow all the same."""
    line = Replica(feed=ResequencerSettings(max_buffered_messages=10))
    for number in range(100):
        line.hears(line.does([("store", "pool", [number % NUMBERS]), "load"]))
    assert len(line.resequencer._buffer) <= 10
    assert line.core.loads.queue_ahead("a") == LOAD.queued_prefill_tokens
    line.settle()
    assert line.known() == line.held


def test_malformed_messages_are_counted_and_mended() -> None:
    """Garbage raises nothing; it is counted and leads to a snapshot."""
    line = Replica()
    line.settle()
    for data in (b"", b"\x93", b"\xff" * 100, FeedSequencer("b", "e").publish([LOAD])[0]):
        line.resequencer.on_delta(data, line.now_s)
        line.resequencer.on_chunk(data, line.now_s)
    assert line.core.counters.feed.malformed >= 4
    assert not line.resequencer.live
    line.settle()


def test_snapshot_of_many_blocks_comes_in_bounded_pieces() -> None:
    """Half a million blocks never become one message."""
    sequencer = FeedSequencer("a", "e", 2048)
    sequencer.publish([BlocksStored(Random(0).randbytes(16 * 500_000))])
    chunks = list(sequencer.snapshot(b"12345678"))
    assert len(chunks) == 245
    assert max(map(len, chunks)) < 2048 * 16 + 200
