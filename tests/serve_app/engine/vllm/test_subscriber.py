"""Over real sockets: a late start, lost batches and a lost tail are repaired; what cannot be is forgotten, and said."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from router.feed.sequencer import BlockMirror
from router.protocol.block_hash import hash_blocks, split_chain
from router.protocol.events import Event
from serve_app.engine.vllm.events.batches import AllBlocksCleared, BlockRemoved, BlockStored
from serve_app.engine.vllm.events.endpoints import EventEndpoints
from serve_app.engine.vllm.events.pool import VllmPool
from serve_app.engine.vllm.events.subscriber import EventSubscriber
from tests.serve_app.engine.vllm.pool_model import encode
from tests.serve_app.engine.vllm.publisher import Publisher

ROOT = b"r" * 16


def block(name: int) -> BlockStored:
    return BlockStored([bytes([name])], None, [name, name], 2, "GPU", None, [(ROOT.hex(),)], 0, "full_attention")


def ours(name: int) -> bytes:
    return hash_blocks(ROOT, np.array([name, name], dtype=np.int32), 2)


def until(true: Callable[[], object]) -> None:
    """Wait for it, up to a generous limit."""
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


class Routers:
    """What routers were told."""

    def __init__(self) -> None:
        self.mirror = BlockMirror()

    def __call__(self, events: list[Event]) -> None:
        for event in events:
            self.mirror.apply(event)

    def held(self) -> set[bytes]:
        return set(split_chain(self.mirror.tiers().get("pool", b"")))


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
def subscriber(endpoints: EventEndpoints, routers: Routers) -> Iterator[EventSubscriber]:
    made = EventSubscriber(endpoints, VllmPool(2, 100), routers)
    assert made.healthy(), "it need not listen where there are no events"
    made.start()
    yield made
    made.stop()
    made.stop()


@pytest.fixture
def engine(endpoints: EventEndpoints) -> Iterator[Publisher]:
    made = Publisher(endpoints.publish, endpoints.replay, kept=3)
    yield made
    made.stop()


def test_nobody_else_reads_the_prompts(endpoints: EventEndpoints) -> None:
    assert stat.S_IMODE(endpoints.directory.stat().st_mode) == 0o700
    assert endpoints.publish.startswith("ipc://")
    assert endpoints.replay.startswith("ipc://")


def test_what_a_killed_owner_left_goes_with_the_next_start(
    endpoints: EventEndpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what a living one has, or one that is being made, stays."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (being_made := tmp_path / "warmpath-vllm-x").mkdir()
    living = EventEndpoints.create()
    made = "from serve_app.engine.vllm.events.endpoints import EventEndpoints as E; import os, signal; "
    code = made + "print(E.create().directory, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    killed = Path(subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True).stdout.strip())
    assert killed.exists()
    EventEndpoints.create().remove()
    assert not killed.exists()
    assert living.directory.exists()
    assert being_made.exists()
    living.remove()


def test_lost_batches_and_a_lost_tail_are_repaired(
    engine: Publisher, subscriber: EventSubscriber, routers: Routers, caplog: pytest.LogCaptureFixture
) -> None:
    """The first batches of an engine often come before its subscriber is connected."""
    engine.send(encode([block(1)]), lose=True)
    engine.send(encode([block(2)]))
    engine.send(encode([BlockRemoved([bytes([1])])]), lose=True)
    until(lambda: routers.held() == {ours(2)})
    engine.send(encode([block(3)]), lose=True)
    until(lambda: routers.held() == {ours(2), ours(3)})
    assert subscriber.healthy()
    assert "lost" not in caplog.text


def test_what_the_engine_has_no_longer_is_forgotten(
    engine: Publisher, subscriber: EventSubscriber, routers: Routers, caplog: pytest.LogCaptureFixture
) -> None:
    engine.send(encode([block(0)]))
    until(lambda: routers.held() == {ours(0)})
    for name in range(1, 9):
        engine.send(encode([block(name)]), lose=True)
    until(lambda: routers.held() == {ours(name) for name in (6, 7, 8)})
    assert "5 batches of KV events are lost" in caplog.text


def test_a_batch_that_cannot_be_read_empties_the_directory_and_the_next_one_counts(
    engine: Publisher, subscriber: EventSubscriber, routers: Routers
) -> None:
    for payload in (encode([block(1)]), b"what?", encode([block(2)])):
        engine.send(payload)
    until(lambda: routers.held() == {ours(2)})


def test_an_engine_that_cannot_be_routed_by_is_followed_no_longer(
    engine: Publisher, subscriber: EventSubscriber, routers: Routers, caplog: pytest.LogCaptureFixture
) -> None:
    engine.send(encode([block(1)]))
    until(routers.held)
    engine.send(encode([block(2)], rank=3))
    until(lambda: not subscriber.healthy())
    assert "data parallel rank 3" in caplog.text
    assert routers.held() == set()


def test_a_sink_that_fails_does_not_end_the_listening(engine: Publisher, endpoints: EventEndpoints) -> None:
    """And whoever waits for a reset to be told is told."""
    calls: list[list[Event]] = []

    def sink(events: list[Event]) -> None:
        calls.append(events)
        raise RuntimeError("full")

    subscriber = EventSubscriber(endpoints, VllmPool(2, 100), sink)  # type: ignore[arg-type]
    subscriber.start()
    engine.send(encode([block(1)]))
    until(lambda: len(calls) == 1)
    assert not subscriber.cleared.is_set()
    engine.send(encode([AllBlocksCleared(), block(2)]))
    assert subscriber.cleared.wait(60)
    subscriber.stop()


def test_it_ends_while_a_question_is_open_that_nobody_takes(endpoints: EventEndpoints) -> None:
    """An engine that was killed answers no more; the replica has to end all the same."""
    asked = threading.Event()

    class Asking(EventSubscriber):
        def _catch_up(self, context: Any) -> None:
            asked.set()
            super()._catch_up(context)

    listener = Asking(endpoints, VllmPool(2, 8), lambda _: None)
    listener.start()
    assert asked.wait(60)
    listener.stop()
    assert not listener.healthy()
