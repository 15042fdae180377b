"""Predictions by a server's events against what it delivered."""

import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.protocol.events import BlocksStored, CacheCleared, Event
from router.vllm_events.far_engine import JUDGED, SILENT_S, WRONG, FarEngine
from tests.router.vllm_events.pool_model import Routers


class Follower:
    """A subscriber's counts, and what it is told to send."""

    def __init__(self, engine: FarEngine) -> None:
        self.connected, self.connections, self.batches, self.unsupported = True, 1, 0, ""
        self.resent, self.failed = False, ""
        self._engine = engine

    def tell(self, *, anew: bool) -> None:
        assert anew
        self._engine.hear([CacheCleared(), BlocksStored(b"k" * 16)])


def judged() -> tuple[FarEngine, Follower, Routers]:
    routers = Routers()
    engine = FarEngine(16, 100, routers)
    engine.follower = follower = Follower(engine)  # type: ignore[assignment]
    return engine, follower, routers


def test_a_liar_is_believed_again_after_a_row_of_right_predictions() -> None:
    engine, _, routers = judged()
    engine.hear([BlocksStored(b"b" * 16)])
    for _ in range(WRONG):
        assert not engine.doubt(0.0)
        engine.judge(100, 0)
    assert engine.doubt(0.0) == f"of its last {WRONG} predictions {WRONG} were wrong: fewer tokens were cached"
    assert not routers.held()
    engine.hear([BlocksStored(b"c" * 16)])
    assert not routers.held()
    for _ in range(JUDGED - 1):
        engine.judge(100, 100)
        assert engine.doubt(0.0)
    engine.judge(100, 116)
    assert not engine.doubt(0.0)
    assert routers.held() == {b"k" * 16}


def test_a_liar_whose_feed_came_back_is_judged_anew() -> None:
    """It may be another process, which came so soon that nobody missed the first one."""
    engine, follower, routers = judged()
    for _ in range(WRONG):
        engine.judge(100, 0)
    assert engine.doubt(0.0)
    follower.connections += 1
    assert not engine.doubt(0.0)
    assert routers.held() == {b"k" * 16}
    for _ in range(WRONG):
        assert not engine.doubt(0.0)
        engine.judge(100, 0)
    assert engine.doubt(0.0)


def lied(engine: FarEngine) -> None:
    for _ in range(WRONG):
        engine.judge(100, 0)


@pytest.mark.parametrize("drop", [FarEngine.forget, lied])
def test_nothing_that_is_on_its_way_comes_after_the_blocks_are_forgotten(drop: Callable[[FarEngine], None]) -> None:
    heard: list[Event] = []
    on_its_way, go_on = threading.Event(), threading.Event()

    def slow(events: list[Event]) -> None:
        if isinstance(events[0], BlocksStored):
            on_its_way.set()
            go_on.wait(60)
        heard.extend(events)

    engine = FarEngine(16, 100, slow)  # type: ignore[arg-type]
    engine.follower = Follower(engine)  # type: ignore[assignment]
    listening = threading.Thread(target=engine.hear, args=([BlocksStored(b"b" * 16)],))
    listening.start()
    assert on_its_way.wait(60)
    dropping = threading.Thread(target=drop, args=(engine,))
    dropping.start()
    dropping.join(0.2)  # without order, it is done now
    go_on.set()
    listening.join(60)
    dropping.join(60)
    engine.hear([BlocksStored(b"c" * 16)])
    assert heard == [BlocksStored(b"b" * 16), CacheCleared()]


@given(st.lists(st.tuples(st.integers(0, 64), st.integers(0, 64))))
def test_only_broken_promises_count(requests: list[tuple[int, int]]) -> None:
    """A request without a promise, or with more than was promised, proves no lie."""
    engine, _, _ = judged()
    for promised, more in requests:
        engine.judge(promised, promised + more)
    assert not engine.doubt(0.0)
    assert engine.right == sum(promised > 0 for promised, _ in requests)


def test_events_that_never_come_are_missed_after_a_while() -> None:
    engine, follower, _ = judged()
    engine.computed(10.0)
    assert not engine.doubt(10.0 + SILENT_S)
    assert engine.doubt(10.1 + SILENT_S).startswith("it publishes no KV events")
    follower.batches += 1
    assert not engine.doubt(11.0 + SILENT_S)
    follower.connected = False
    assert engine.doubt(0.0) == "its feed of KV events is cut"
    follower.resent = True
    assert not engine.doubt(0.0), "batches come by the other way, a second late"
    follower.resent = False
    follower.connections = 0
    assert engine.doubt(0.0) == "no KV events can be heard from it"
    follower.failed = "ZMQError"
    assert engine.doubt(0.0) == "its KV events could not be followed (ZMQError); that begins anew"
    follower.unsupported = "another block size"
    assert engine.doubt(0.0) == "another block size"
