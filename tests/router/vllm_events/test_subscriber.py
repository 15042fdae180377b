"""Events over real sockets: lost batches are repaired, bad ones end nothing, and nobody else reads them."""

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import zmq

from router.background import LOOPS
from router.protocol.events import BlocksStored, CacheCleared, Event
from router.vllm_events.batches import AllBlocksCleared, BlockRemoved, BlockStored
from router.vllm_events.order import COMPLAIN_S, BatchOrder
from router.vllm_events.pool import FollowedPool
from router.vllm_events.subscriber import REPLAY_S, EventSubscriber
from serve_app.engine.vllm.event_endpoints import EventEndpoints
from tests.harness.eventually import eventually
from tests.router.vllm_events.pool_model import Publisher, Routers, chain, encode, frame_of, stored


def block(name: int) -> BlockStored:
    return stored(block_hashes=[bytes([name])], token_ids=[name, name])


def ours(name: int) -> bytes:
    return chain(name, name)


@pytest.fixture
def endpoints() -> Iterator[EventEndpoints]:
    made = EventEndpoints.create()
    yield made
    made.remove()
    assert not made.directory.exists()


@pytest.fixture
def routers() -> Routers:
    return Routers()


@pytest.fixture
def engine(endpoints: EventEndpoints) -> Iterator[Publisher]:
    made = Publisher(endpoints.publish, endpoints.replay, kept=3)
    yield made
    made.stop()


@pytest.fixture
def subscriber(endpoints: EventEndpoints, engine: Publisher, routers: Routers) -> Iterator[EventSubscriber]:
    made = EventSubscriber(endpoints.publish, endpoints.replay, FollowedPool(2, 100), routers)
    assert made.healthy(), "without events it need not listen"
    made.start()
    yield made
    made.stop()
    made.stop()


def test_nobody_else_reads_the_prompts(endpoints: EventEndpoints) -> None:
    assert stat.S_IMODE(endpoints.directory.stat().st_mode) == 0o700
    assert all(address.startswith(f"ipc://{endpoints.directory}/") for address in (endpoints.publish, endpoints.replay))
    assert endpoints.of_rank(0) == (endpoints.publish, endpoints.replay)


def test_the_next_start_removes_a_killed_owners_directory(
    endpoints: EventEndpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Directories of living owners, and those being made, stay."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (being_made := tmp_path / "warmpath-vllm-x").mkdir()
    living = EventEndpoints.create()
    made = "from serve_app.engine.vllm.event_endpoints import EventEndpoints as E; import os, signal; "
    code = made + "print(E.create().directory, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    killed = Path(subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True).stdout.strip())
    assert killed.exists()
    EventEndpoints.create().remove()
    assert not killed.exists()
    assert living.directory.exists()
    assert being_made.exists()
    living.remove()


def test_lost_batches_and_a_lost_tail_are_repaired_and_unrecoverable_blocks_are_forgotten(
    engine: Publisher, subscriber: EventSubscriber, routers: Routers, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine's first batches often precede the subscriber's connection; the engine keeps its last three."""
    engine.send(encode([block(1)]), lose=True)
    engine.send(encode([block(2)]))
    engine.send(encode([BlockRemoved([bytes([1])])]), lose=True)
    eventually(lambda: routers.held() == {ours(2)})
    engine.send(encode([block(3)]), lose=True)
    eventually(lambda: routers.held() == {ours(2), ours(3)})
    assert "lost" not in caplog.text
    for name in range(4, 12):
        engine.send(encode([block(name)]), lose=True)
    eventually(lambda: routers.held() == {ours(name) for name in (9, 10, 11)})
    assert "batches of KV events are lost" in caplog.text
    assert subscriber.healthy()


def test_an_engine_that_cannot_be_routed_by_is_followed_no_longer(
    engine: Publisher, subscriber: EventSubscriber, routers: Routers, caplog: pytest.LogCaptureFixture
) -> None:
    engine.send(encode([block(1)]))
    eventually(routers.held)
    engine.send(encode([block(2)], rank=3))
    eventually(lambda: not subscriber.healthy())
    assert "data parallel ranks 0 and 3" in caplog.text
    assert routers.held() == set()


def test_unreadable_or_undeliverable_events_do_not_end_the_listening(endpoints: EventEndpoints) -> None:
    """A malformed batch empties the directory, the next one counts, and a reset is still signalled."""
    calls: list[Sequence[Event]] = []

    def sink(events: Sequence[Event]) -> None:
        calls.append(events)
        raise RuntimeError("full")

    subscriber = EventSubscriber(endpoints.publish, endpoints.replay, FollowedPool(2, 100), sink)
    for number, payload in enumerate((encode([block(1)]), b"junk", encode([block(2)]))):
        assert not subscriber.cleared.is_set() or number == 2
        subscriber.take(number, payload)
    assert calls == [[BlocksStored(ours(1))], [CacheCleared()], [BlocksStored(ours(2))]]
    subscriber.cleared.clear()
    subscriber.take(3, encode([AllBlocksCleared(), block(2)]))
    assert subscriber.cleared.is_set()


def test_it_ends_while_a_question_is_unanswered(endpoints: EventEndpoints) -> None:
    """A killed engine answers no more; the replica must end all the same."""
    asked = threading.Event()

    class Asking(EventSubscriber):
        def catch_up(self) -> None:
            asked.set()
            super().catch_up()

    listener = Asking(endpoints.publish, endpoints.replay, FollowedPool(2, 8), lambda _: None)
    listener.start()
    assert asked.wait(60)
    listener.stop()
    assert not listener.healthy()


BAD_FRAMES = [
    (b"junk",),
    (b"",),
    (b"topic", b"junk", encode([block(9)])),
    (b"topic", frame_of(1)[:7], encode([block(9)])),
    (b"topic", b"x" * 100, encode([block(9)])),
    (encode([block(9)]), frame_of(1)),
    (b"topic", frame_of(1), b"junk"),
    (b"topic", frame_of(1), b"\x81" * 9000),
    tuple(b"frame" for _ in range(500)),
]


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("frames", BAD_FRAMES)
def test_a_message_that_is_no_batch_costs_the_blocks_and_not_the_listening(
    endpoints: EventEndpoints, routers: Routers, frames: tuple[bytes, ...], far: bool
) -> None:
    """What it stood for is not known, so nothing is believed until it is told again; the next batch counts."""
    engine = Publisher(endpoints.publish, endpoints.replay, kept=1)
    listener = EventSubscriber(endpoints.publish, endpoints.replay, FollowedPool(2, 100), routers, far=far)
    listener.start()
    try:
        engine.send(encode([block(1)]))
        eventually(lambda: ours(1) in routers.held())
        listener.cleared.clear()
        engine.send_frames(*frames)
        eventually(listener.cleared.is_set)
        assert listener.healthy()
        assert not listener.failed
        names = iter(range(10, 10_000))

        def passed_on() -> bool:
            """The listener hears what follows, once it is back."""
            name = next(names)
            engine.send(encode([block(name)]))
            return ours(name - 1) in routers.held()

        eventually(passed_on, every_s=0.02)
        assert ours(9) not in routers.held()
    finally:
        listener.stop()
        engine.stop()


def test_a_number_may_be_followed_by_the_name_of_the_process(
    endpoints: EventEndpoints, routers: Routers, caplog: pytest.LogCaptureFixture
) -> None:
    """As newer versions of vLLM send it: 8 bytes of number, 16 of name. With another name, numbers begin anew."""
    engine = Publisher(endpoints.publish, endpoints.replay, kept=3, name=b"a" * 16)
    listener = EventSubscriber(endpoints.publish, endpoints.replay, FollowedPool(2, 100), routers, far=True)
    listener.start()
    try:
        for name in range(1, 7):
            engine.send(encode([block(name)]), lose=name in (3, 5))
        eventually(lambda: {ours(name) for name in (4, 5, 6)} <= routers.held())
        engine.send_frames(b"topic", frame_of(0) + b"b" * 16, encode([block(8)]))
        eventually(lambda: routers.held() == {ours(8)})
        engine.send_frames(b"topic", frame_of(1) + b"b" * 16, encode([block(9)]))
        eventually(lambda: routers.held() == {ours(8), ours(9)})
        assert "lost" not in caplog.text
    finally:
        listener.stop()
        engine.stop()


class Line(BatchOrder):
    """Follows an engine that resends what ``kept`` has."""

    def __init__(self, routers: Callable[[Sequence[Event]], None], **more: Any) -> None:
        super().__init__(FollowedPool(2, 100, far=bool(more.get("far"))), routers, **more)
        self.kept: dict[int, bytes] = {}

    def catch_up(self) -> None:
        for number in range(max(0, self.expected), max(self.kept, default=-1) + 1):
            self.take(number, self.kept[number])


BEATS = [b"", encode([]), b"\x92\xcb?\xf0\x00\x00\x00\x00\x00\x00\x90"]


@pytest.mark.parametrize("beat", BEATS)
@pytest.mark.parametrize("counts", [False, True])
def test_a_sign_of_life_has_no_events_and_reveals_what_was_lost(beat: bytes, counts: bool, routers: Routers) -> None:
    """Whether it uses a number up (``counts``) or repeats the last or next one: nothing is forgotten or missed."""
    line = Line(routers, far=True)
    line.kept = {number: encode([block(number)]) for number in range(3)}
    line.hear(0, line.kept[0])
    for _ in range(3):
        line.hear(0, beat)
    assert (routers.held(), line.batches) == ({ours(0)}, 1)
    line.hear(3, beat)
    assert routers.held() == {ours(0), ours(1), ours(2)}, "those that were lost"
    following = 4 if counts else 3
    line.hear(following, encode([block(5)]))
    line.hear(following, encode([block(6)]))
    line.hear(following + 1, encode([block(7)]))
    assert {ours(0), ours(1), ours(2), ours(5), ours(7)} <= routers.held()
    assert line.batches == 5


def test_a_listener_that_fails_says_so_and_begins_anew(
    endpoints: EventEndpoints, engine: Publisher, routers: Routers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.vllm_events.subscriber.AGAIN_S", 0.02)
    said: list[tuple[str, bool]] = []

    class Failing(EventSubscriber):
        left = 3

        def received(self, frames: Sequence[bytes]) -> None:
            if self.left:
                self.left -= 1
                raise RuntimeError
            super().received(frames)

        def _deliver(self, events: Sequence[Event]) -> None:
            said.append((self.failed, self.connected))
            super()._deliver(events)

    listener = Failing(endpoints.publish, endpoints.replay, FollowedPool(2, 100), routers, far=True)
    listener.start()
    try:
        names = iter(range(1, 10_000))

        def passed_on() -> bool:
            name = next(names)
            engine.send(encode([block(name)]))
            return not listener.left and ours(name - 1) in routers.held()

        eventually(passed_on, every_s=0.02)
        assert (listener.left, listener.healthy(), listener.failed, listener.connected) == (0, True, "", True)
        assert ("RuntimeError", False) in said
        assert LOOPS.failing()["EventSubscriber._listen"] == "RuntimeError", "health tells it"
        assert listener.connections, "its owner looks again whose process it is"
    finally:
        listener.stop()


def test_a_batch_that_fails_is_forgotten_with_all_blocks_and_the_next_one_counts(routers: Routers) -> None:
    class Pool(FollowedPool):
        fails = False

        def translate(self, batch: Any) -> list[Event]:
            if self.fails:
                raise KeyError("a fault of ours")
            return super().translate(batch)

    pool = Pool(2, 100)
    line = BatchOrder(pool, routers)
    for number, fails in enumerate((False, True, False)):
        pool.fails = fails
        line.take(number, encode([block(number)]))
    assert routers.held() == {ours(2)}


def test_unsupported_events_of_a_server_elsewhere_are_heard_again_once_it_connects_anew(routers: Routers) -> None:
    """Another process may listen there then."""
    line = Line(routers, far=True)
    line.turned(True)
    line.hear(0, encode([block(1)]))
    line.hear(1, encode([block(2)], rank=3))
    assert "data parallel ranks 0 and 3" in line.unsupported
    line.hear(2, encode([block(3)]))
    assert routers.held() == set()
    line.turned(False)
    line.turned(True)
    line.hear(0, encode([block(4)], rank=3))
    assert (line.unsupported, routers.held()) == ("", {ours(4)})


def test_a_replay_without_an_end_ends_in_time(endpoints: EventEndpoints, routers: Routers) -> None:
    """Each message takes a second of this clock."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    replay = context.socket(zmq.ROUTER)
    replay.bind(endpoints.replay)
    over = threading.Event()

    def flood() -> None:
        client, empty, _ = replay.recv_multipart()
        number = 0
        while not over.is_set():
            replay.send_multipart((client, empty, frame_of(number), encode([block(number % 200)])))
            number += 1

    flooding = threading.Thread(target=flood)
    flooding.start()
    ticks = iter(range(1_000_000))
    line = EventSubscriber(
        endpoints.publish, endpoints.replay, FollowedPool(2, 500), routers, far=True, clock=lambda: float(next(ticks))
    )
    line.request_missed(context)
    over.set()
    assert (line.resent, line.resends) == (False, False)
    assert 1 <= line.batches <= REPLAY_S
    flooding.join()
    context.destroy(linger=0)


@pytest.mark.parametrize("factor", [0.5, 0.99, 1.0, 2.0, 1000.0])
def test_bad_batches_are_told_once_a_minute(factor: float, routers: Routers, caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    line = BatchOrder(FollowedPool(2, 100), routers, far=True, clock=lambda: now_s)
    for number in range(50):
        line.take(number, b"junk")
    now_s = COMPLAIN_S * factor
    line.take(50, b"junk")
    assert caplog.text.count("cannot be read") == 1 + (factor >= 1)
