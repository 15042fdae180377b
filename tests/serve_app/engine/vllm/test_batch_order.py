"""Batches come out once each and in order, whatever was lost, late or twice; what is lost for good is said."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serve_app.engine.vllm.events.batch_order import MAX_AHEAD, REPLAY_TIMEOUT_S, SILENCE_S, BatchOrder, Lost


def test_a_gap_is_asked_for_at_once_and_filled() -> None:
    order = BatchOrder(0.0)
    assert order.live(0, b"0", 0.0) == [b"0"]
    assert order.ask(0.0) is None
    assert order.live(3, b"3", 0.0) == []
    assert order.ask(0.0) == 1
    assert order.ask(0.0) is None, "one question at a time"
    assert order.replayed(1, b"1") == [b"1"]
    assert order.live(1, b"1", 0.0) == []
    assert order.replayed(2, b"2") == [b"2", b"3"]
    assert order.replayed(3, b"3") == []
    assert order.replay_ended(0.0) == []
    assert (order.replayed_batches, order.expected) == (2, 4)


def test_a_lost_tail_is_found_after_a_silence() -> None:
    order = BatchOrder(0.0)
    assert order.ask(SILENCE_S / 2) is None
    assert order.ask(SILENCE_S) == 0
    assert order.replayed(0, b"0") == [b"0"]
    assert order.replay_ended(SILENCE_S) == []
    assert order.ask(SILENCE_S * 1.5) is None


def test_what_the_engine_has_no_longer_is_lost() -> None:
    order = BatchOrder(0.0)
    assert order.live(5, b"5", 0.0) == []
    assert order.ask(0.0) == 0
    assert order.replayed(3, b"3") == []
    assert order.replay_ended(0.0) == [Lost(3), b"3", Lost(1), b"5"], "0 to 2 are gone, and 4"


def test_an_answer_to_an_older_question_does_not_say_that_a_batch_is_lost() -> None:
    """The engine was asked after a silence and answered before batch 0 was there."""
    order = BatchOrder(0.0)
    assert order.ask(SILENCE_S) == 0
    assert order.live(1, b"1", SILENCE_S) == []
    assert order.replay_ended(SILENCE_S) == []
    assert order.ask(SILENCE_S) == 0
    assert order.replayed(0, b"0") == [b"0", b"1"]


def test_an_engine_that_does_not_answer_is_asked_again() -> None:
    order = BatchOrder(0.0)
    assert order.ask(SILENCE_S) == 0
    assert order.ask(SILENCE_S + REPLAY_TIMEOUT_S / 2) is None
    assert order.ask(SILENCE_S + REPLAY_TIMEOUT_S) == 0


@given(
    sent=st.integers(0, 40),
    kept=st.integers(0, 40),
    lost=st.sets(st.integers(0, 39)),
    answers=st.lists(st.booleans(), max_size=40),
)
def test_everything_comes_once_in_order_or_is_said_to_be_lost(
    sent: int, kept: int, lost: set[int], answers: list[bool]
) -> None:
    """The naive oracle: the batches themselves. ``answers``: at which live batches the engine answers questions."""
    order, out, now_s = BatchOrder(0.0), [], 0.0

    def answer(published: int) -> None:
        first = order.ask(now_s)
        if first is not None:
            for number in range(max(first, published - kept), published):
                out.extend(order.replayed(number, number.to_bytes(1, "big")))
            out.extend(order.replay_ended(now_s))

    for number in range(sent):
        now_s += 0.3
        if number not in lost:
            out.extend(order.live(number, number.to_bytes(1, "big"), now_s))
        if number < len(answers) and answers[number]:
            answer(number + 1)
    for _ in range(3):
        now_s += SILENCE_S
        answer(sent)
    at = 0
    for item in out:
        if isinstance(item, Lost):
            at += item.batches
        else:
            assert item == at.to_bytes(1, "big")
            at += 1
    assert at == order.expected
    assert at == sent or kept == 0, "nothing that can be had is missing at the end"
    if kept >= sent:
        assert not any(isinstance(item, Lost) for item in out)


def test_what_waits_behind_a_gap_is_bounded_and_nothing_is_lost_by_that() -> None:
    order = BatchOrder(0.0)
    for number in range(1, MAX_AHEAD + 50):
        order.live(number, b"x", 0.0)
    assert order.ask(0.0) == 0
    assert len(order.replayed(0, b"x")) == MAX_AHEAD + 1
    for number in range(MAX_AHEAD + 1, MAX_AHEAD + 50):
        assert order.replayed(number, b"x") == [b"x"]
