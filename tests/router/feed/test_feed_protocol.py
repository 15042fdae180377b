"""FeedSequencer and FeedResequencer without sockets. That no event is lost is tested in ``test_drift``."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from router.feed.sequencing import FIRST_BACKOFF_S, LAST_BACKOFF_S, MAX_HELD_BYTES, SILENCE_S, TIMEOUT_S
from tests.router.feed.feed_line import LOAD, NUMBERS, Replica


def test_a_repeated_message_changes_nothing_and_a_gap_asks_for_a_snapshot() -> None:
    """Messages after a lost one, except loads, are held until a snapshot has closed the gap."""
    line = Replica()
    line.settle()
    counters = line.core.counters.feed
    messages = [line.does([event])[0] for event in (("store", "pool", [1]), ("remove", "pool", [1]), "load")]
    line.hears([messages[index] for index in (0, 0, 1, 0, 2, 1)])
    assert line.resequencer.live
    assert line.resequencer.poll(line.now_s) is None
    assert line.known() == line.held
    gaps = counters.gaps
    line.does([("store", "pool", [1])])  # lost
    for number in (2, 3):
        line.hears(line.does([("store", "pool", [number])]))
    assert counters.gaps == gaps + 1
    assert not line.resequencer.live
    assert not line.known()["pool"]
    nonce = line.resequencer.poll(line.now_s + LAST_BACKOFF_S)
    assert nonce is not None
    snapshot = list(line.sequencer.snapshot(nonce))
    line.hears(line.does([("store", "pool", [4])]))  # overtakes the snapshot
    for chunk in snapshot:
        line.resequencer.on_chunk(chunk, line.now_s)
    assert line.resequencer.live
    assert line.known() == line.held


def test_a_silent_feed_that_lost_nothing_gets_no_snapshot_anew() -> None:
    """The router asks whether it lost anything, and the first piece of the answer settles it."""
    line = Replica()
    line.settle()
    counted = line.core.counters.feed.snapshots
    nonce = line.resequencer.poll(line.now_s + 4 * SILENCE_S)
    assert nonce is not None
    for chunk in line.sequencer.snapshot(nonce):
        line.resequencer.on_chunk(chunk, line.now_s)
    assert (line.resequencer.live, line.core.counters.feed.snapshots) == (True, counted)


def test_unanswered_requests_back_off() -> None:
    """A dead publisher is asked ever more rarely, at most once in ``LAST_BACKOFF_S``."""
    line = Replica()
    asked = [now / 100 for now in range(6000) if line.resequencer.poll(now / 100) is not None]
    pauses = [after - before for before, after in pairwise(asked)]
    assert pauses[0] < 2 * TIMEOUT_S < LAST_BACKOFF_S <= pauses[-1]
    assert len(asked) < 20


def test_a_request_that_could_not_be_sent_is_not_waited_for() -> None:
    """The backoff alone sets the time of the next one."""
    line = Replica()
    assert line.resequencer.poll(0.0) is not None
    line.resequencer.request_unsent()
    assert line.resequencer.poll(FIRST_BACKOFF_S) is None
    assert line.resequencer.poll(2.1 * FIRST_BACKOFF_S) is not None
    assert line.resequencer.poll(TIMEOUT_S) is None


def test_held_messages_are_bounded_while_no_snapshot_arrives() -> None:
    """Any number of messages may precede the snapshot; load reports take effect all the same."""
    line = Replica()
    most = MAX_HELD_BYTES // 1024  # each counts as at least so much
    for number in range(most + 100):
        line.hears(line.does([("store", "pool", [number % NUMBERS]), "load"]))
    assert len(line.resequencer._early) <= most
    assert line.core.loads.queue_ahead("a") == LOAD.queued_prefill_tokens
    line.settle()
    assert line.known() == line.held


def test_malformed_messages_are_counted_and_mended() -> None:
    line = Replica()
    line.settle()
    for data in (b"", b"\x93", b"\xff" * 100):
        line.resequencer.on_delta(data, line.now_s)
        line.resequencer.on_chunk(data, line.now_s)
    assert line.core.counters.feed.malformed == 6
    assert not line.resequencer.live
    line.settle()


@given(failures=st.integers(0, 12))
def test_after_an_answer_the_pauses_begin_anew(failures: int) -> None:
    """However long a publisher was away: the next gap is closed as fast as the first one."""
    line = Replica()

    def ask() -> bytes:
        while (nonce := line.resequencer.poll(line.now_s)) is None:
            line.now_s += 0.01
        return nonce

    for _ in range(failures):
        ask()
    for chunk in line.sequencer.snapshot(ask()):
        line.resequencer.on_chunk(chunk, line.now_s)
    assert line.resequencer.live
    line.now_s += 3 * LAST_BACKOFF_S
    line.resequencer.on_delta(b"", line.now_s)
    asked = []
    for _ in range(4):
        ask()
        asked.append(line.now_s)
        line.now_s += 0.01
    fresh = Replica()
    for pause_s, attempt in zip((after - before for before, after in pairwise(asked)), range(4), strict=False):
        assert pause_s <= max(TIMEOUT_S, 2 * FIRST_BACKOFF_S * 2**attempt) + 0.1
    assert fresh.resequencer.live is False


@given(st.lists(st.integers(0, 5), max_size=30))
def test_a_message_is_held_once_however_often_it_comes(order: list[int]) -> None:
    """While a snapshot is missing: its loads are told once, and it counts once against the bound."""
    line, told = Replica(), list[int]()
    line.resequencer._deliver = lambda events: told.extend(e.queued_prefill_tokens for e in events)
    messages = [line.does([("store", "pool", [number]), "load"])[0] for number in range(6)]
    sizes = dict[int, int]()
    for number in order:
        line.hears([messages[number]])
        sizes[number] = len(messages[number]) + 1024
        assert line.resequencer._early_bytes == sum(sizes.values())
    assert len(told) == len(sizes) == len(line.resequencer._early)


def test_a_feed_that_loses_nothing_asks_once() -> None:
    """Its first snapshot is followed by every message, in sequence."""
    line = Replica()
    nonce = line.resequencer.poll(line.now_s)
    assert nonce is not None
    for chunk in line.sequencer.snapshot(nonce):
        line.resequencer.on_chunk(chunk, line.now_s)
    for number in range(10):
        line.hears(line.does([("store", "pool", [number])]))
        line.now_s += 1.0
        assert line.resequencer.live and line.resequencer.poll(line.now_s) is None
    assert line.known() == line.held
    counters = line.core.counters.feed
    assert (counters.gaps, counters.snapshots) == (0, 1)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_each_gap_is_counted_once(lost: list[int]) -> None:
    """However many messages are missing, and however many come before the snapshot."""
    line = Replica()
    line.settle()
    before = line.core.counters.feed.gaps
    for count in lost:
        for _ in range(count):
            line.does(["load"])
        for _ in range(count):
            line.hears(line.does(["load"]))
        line.settle()
    assert line.core.counters.feed.gaps == before + len(lost)


def test_a_silent_feed_is_not_live_once_its_check_is_not_answered() -> None:
    """Its publisher may be frozen: routers must not take the last reports for true. An answer settles the check."""
    line = Replica()
    line.settle()
    line.now_s += SILENCE_S
    nonce = line.resequencer.poll(line.now_s)
    assert nonce is not None and line.resequencer.live
    for chunk in line.sequencer.snapshot(nonce):
        line.resequencer.on_chunk(chunk, line.now_s)
    for _ in range(4):
        line.now_s += SILENCE_S / 5
        assert line.resequencer.poll(line.now_s) is None and line.resequencer.live
    line.now_s += LAST_BACKOFF_S
    assert line.resequencer.poll(line.now_s) is not None and line.resequencer.live
    line.resequencer.poll(line.now_s + TIMEOUT_S)
    assert not line.resequencer.live


@given(st.integers(0, 5), st.booleans())
def test_pieces_of_an_earlier_request_are_ignored(came: int, between: bool) -> None:
    """They describe earlier blocks: some came before the request was given up, the rest comes after the next one."""
    line = Replica()
    line.does([("store", "pool", list(range(15)))])
    first = line.resequencer.poll(line.now_s)
    assert first is not None
    old = list(line.sequencer.snapshot(first))
    assert len(old) > 3
    for chunk in old[:came]:
        line.resequencer.on_chunk(chunk, line.now_s)
    line.does([("remove", "pool", list(range(0, 15, 2)))])  # lost
    second = None
    while second is None:
        line.now_s += 0.1
        second = line.resequencer.poll(line.now_s)
    new = list(line.sequencer.snapshot(second))
    for at, chunk in enumerate(new):
        line.resequencer.on_chunk(chunk, line.now_s)
        if between and at + 1 < len(new):
            for stale in old:
                line.resequencer.on_chunk(stale, line.now_s)
    assert line.resequencer.live and line.known() == line.held
    for stale in old:
        line.resequencer.on_chunk(stale, line.now_s)
    assert line.resequencer.live and line.known() == line.held
