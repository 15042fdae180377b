"""The feed without sockets: FeedSequencer -> a lossy line -> FeedResequencer -> Directory."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from router.directory.directory import Directory
from router.feed.messages import FeedCounters
from router.feed.resequencer import FeedResequencer, ResequencerSettings
from router.feed.sequencer import FeedSequencer
from router.protocol.events import BlocksRemoved, BlocksStored, CacheCleared, Event, LoadReport

LOAD = LoadReport(7, 1, 2, 8, 64, 1000.0, 0.01)


def packed(*numbers: int) -> bytes:
    return b"".join((number + 2).to_bytes(8, "little") + bytes(8) for number in numbers)


class Line:
    """One replica's sequencer and one router's resequencer, with every message in the test's hands."""

    def __init__(self, seed: int = 0, settings: ResequencerSettings | None = None, blocks_per_message: int = 3) -> None:
        self.now_s = 0.0
        self.rng = Random(seed)
        self.counters = FeedCounters()
        self.directory = Directory(16)
        self.directory.add_replica("a")
        self.blocks_per_message = blocks_per_message
        self.sequencer = FeedSequencer("a", "epoch-0", blocks_per_message)
        self.delivered: list[Event] = []
        self.resequencer = FeedResequencer("a", "epoch-0", self.deliver, self.counters, self.rng, 0.0, settings)

    def deliver(self, epoch: str, events: tuple[Event, ...]) -> None:
        self.delivered.extend(events)
        self.directory.apply("a", epoch, events)

    def restart(self, epoch: str) -> None:
        self.sequencer = FeedSequencer("a", epoch, self.blocks_per_message)

    def settle(self) -> None:
        """Let the line be perfect until nothing is missing any more; a heartbeat shows a lost tail."""
        for _ in range(50):
            for message in self.sequencer.publish([LOAD]):
                self.resequencer.on_delta(message, self.now_s)
            self.now_s += 11.0
            nonce = self.resequencer.poll(self.now_s)
            if nonce is not None:
                for chunk in self.sequencer.snapshot(nonce):
                    self.resequencer.on_chunk(chunk, self.now_s)
            if self.resequencer.live:
                return
        raise AssertionError("the feed never became live")

    def held(self) -> dict[str, set[int]]:
        """What the directory says replica a holds, by tier (found out block by block)."""
        return {"any": {n for n in range(64) if self.directory.match(packed(n)).get("a")}}

    def mirrored(self) -> dict[str, set[int]]:
        everything = b"".join(self.sequencer.mirror.tiers().values())
        return {"any": {int.from_bytes(everything[i : i + 8], "little") - 2 for i in range(0, len(everything), 16)}}


numbers = st.lists(st.integers(0, 63), max_size=8)
tiers = st.sampled_from(["pool", "host"])
cache_events = st.one_of(
    st.builds(lambda n, t: BlocksStored(packed(*n), t), numbers, tiers),
    st.builds(lambda n, t: BlocksRemoved(packed(*n), t), numbers, tiers),
    st.just(CacheCleared()),
    st.just(LOAD),
)
steps = st.lists(
    st.tuples(st.lists(cache_events, max_size=4), st.sampled_from(["send", "poll", "wait", "restart", "garbage"])),
    max_size=25,
)


@settings(max_examples=150)
@given(steps=steps, seed=st.integers(0, 2**32), loss=st.sampled_from([0.0, 0.2, 0.5]))
def test_directory_equals_mirror_after_any_loss(steps: list[tuple[list[Event], str]], seed: int, loss: float) -> None:
    """Whatever is lost, doubled, reordered or garbled, once the line is whole the directory equals the cache.

    docs/routing.md
    """
    line = Line(seed)
    rng = Random(seed + 1)
    wire: list[tuple[bool, bytes]] = []
    for count, (events, action) in enumerate(steps):
        wire += [(True, message) for message in line.sequencer.publish(events)]
        if action == "restart":
            line.restart(f"epoch-{count + 1}")
        elif action == "garbage":
            wire.append((bool(rng.getrandbits(1)), rng.randbytes(rng.randrange(20))))
        elif action == "wait":
            line.now_s += rng.random() * 10
        if action in ("poll", "wait") and (nonce := line.resequencer.poll(line.now_s)) is not None:
            wire += [(False, chunk) for chunk in line.sequencer.snapshot(nonce)]
        if action != "poll":
            sent, wire = wire, []
            for is_delta, data in sent:
                fate = rng.random()
                if fate < loss:
                    continue
                if fate < loss + 0.1:
                    wire.append((is_delta, data))  # comes late (again)
                (line.resequencer.on_delta if is_delta else line.resequencer.on_chunk)(data, line.now_s)
                if rng.random() < 0.1:
                    rng.shuffle(wire)
    line.settle()
    assert line.held() == line.mirrored()


def test_messages_before_the_snapshot_wait_for_it() -> None:
    """A joining router sees the snapshot first, then exactly what was published after it."""
    line = Line()
    line.sequencer.publish([BlocksStored(packed(1, 2, 3, 4, 5))])
    nonce = line.resequencer.poll(0.0)
    assert nonce is not None
    chunks = list(line.sequencer.snapshot(nonce))
    assert len(chunks) == 2, "five blocks in pieces of at most three"
    later = line.sequencer.publish([BlocksRemoved(packed(5))])
    line.resequencer.on_delta(later[0], 0.0)
    assert line.held() == {"any": set()}
    for chunk in chunks:
        line.resequencer.on_chunk(chunk, 0.0)
    assert line.held() == {"any": {1, 2, 3, 4}}
    assert line.resequencer.live
    assert line.resequencer.poll(0.1) is None


def test_gap_asks_for_a_snapshot_once() -> None:
    """A lost message is noticed at the next one and counted once."""
    line = Line()
    line.settle()
    line.sequencer.publish([BlocksStored(packed(1))])  # lost
    for number in (2, 3):
        for message in line.sequencer.publish([BlocksStored(packed(number))]):
            line.resequencer.on_delta(message, line.now_s)
    assert line.counters.gaps == 1
    assert not line.resequencer.live
    assert line.held() == {"any": set()}
    line.settle()
    assert line.held() == {"any": {1, 2, 3}}


def test_reordered_and_doubled_messages_need_no_snapshot() -> None:
    """Messages out of order are put in order; repeated ones change nothing."""
    line = Line()
    line.settle()
    before = line.counters.snapshots
    messages = [
        line.sequencer.publish([event])[0] for event in (BlocksStored(packed(1)), BlocksRemoved(packed(1)), LOAD)
    ]
    for index in (2, 1, 1, 0, 0, 2):
        line.resequencer.on_delta(messages[index], line.now_s)
    assert line.resequencer.live
    assert line.resequencer.poll(line.now_s) is None
    assert line.held() == {"any": set()}
    assert line.counters.snapshots == before


def test_new_epoch_forgets_and_late_messages_of_the_old_one_are_dropped() -> None:
    """After a restart nothing of the former life comes back."""
    line = Line()
    line.settle()
    old = line.sequencer.publish([BlocksStored(packed(1))])
    late = line.sequencer.publish([BlocksStored(packed(2))])
    line.resequencer.on_delta(old[0], line.now_s)
    assert line.held() == {"any": {1}}
    line.restart("epoch-1")
    line.resequencer.on_delta(line.sequencer.publish([BlocksStored(packed(9))])[0], line.now_s)
    assert line.held() == {"any": set()}
    line.resequencer.on_delta(late[0], line.now_s)
    line.settle()
    assert line.held() == {"any": {9}}


def test_unanswered_requests_back_off() -> None:
    """A dead publisher is asked ever more rarely, at most once in ``last_backoff_s``."""
    line = Line(settings=ResequencerSettings(timeout_s=0.5, first_backoff_s=0.1, last_backoff_s=4.0))
    asked = [now / 100 for now in range(6000) if line.resequencer.poll(now / 100) is not None]
    pauses = [after - before for before, after in pairwise(asked)]
    assert pauses[0] < 1.0 < 4.0 <= pauses[-1]
    assert len(asked) < 20


def test_a_request_that_could_not_be_sent_is_not_waited_for() -> None:
    """The backoff alone sets when the next one goes out."""
    line = Line(settings=ResequencerSettings(timeout_s=3600.0, first_backoff_s=0.1))
    assert line.resequencer.poll(0.0) is not None
    line.resequencer.request_unsent()
    assert line.resequencer.poll(0.05) is None
    assert line.resequencer.poll(0.21) is not None
    assert line.resequencer.poll(100.0) is None


def test_buffer_is_bounded_while_no_snapshot_comes() -> None:
    """Memory held for a feed without its snapshot stays within the settings; load reports flow all the same."""
    line = Line(settings=ResequencerSettings(max_buffered_messages=10))
    for number in range(100):
        for message in line.sequencer.publish([BlocksStored(packed(number % 64)), LOAD]):
            line.resequencer.on_delta(message, 0.0)
    assert len(line.resequencer._buffer) <= 10
    assert line.delivered.count(LOAD) == 100
    line.settle()
    assert line.held() == line.mirrored()


def test_malformed_messages_are_counted_and_mended() -> None:
    """Garbage raises nothing; it is counted and leads to a snapshot."""
    line = Line()
    line.settle()
    for data in (b"", b"\x93", b"\xff" * 100, FeedSequencer("b", "e").publish([LOAD])[0]):
        line.resequencer.on_delta(data, line.now_s)
        line.resequencer.on_chunk(data, line.now_s)
    assert line.counters.malformed >= 4
    assert not line.resequencer.live
    line.settle()


def test_snapshot_of_many_blocks_comes_in_bounded_pieces() -> None:
    """Half a million blocks never become one message."""
    sequencer = FeedSequencer("a", "e", 2048)
    sequencer.publish([BlocksStored(Random(0).randbytes(16 * 500_000))])
    chunks = list(sequencer.snapshot(b"12345678"))
    assert len(chunks) == 245
    assert max(map(len, chunks)) < 2048 * 16 + 200
