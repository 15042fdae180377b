"""Events over real sockets: lost batches are repaired, bad ones end nothing, and nobody else reads them."""

import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from router.protocol.events import BlocksStored, CacheCleared, Event
from router.vllm_events.batches import AllBlocksCleared, BlockRemoved, BlockStored
from router.vllm_events.pool import VllmPool
from router.vllm_events.subscriber import EventSubscriber
from serve_app.engine.vllm.event_endpoints import EventEndpoints
from tests.router.vllm_events.pool_model import Publisher, Routers, chain, encode, stored


def block(name: int) -> BlockStored:
    return stored(block_hashes=[bytes([name])], token_ids=[name, name])


def ours(name: int) -> bytes:
    return chain(name, name)


def until(true: Callable[[], object]) -> None:
    """Wait for a condition, up to a generous limit."""
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


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
    made = EventSubscriber(endpoints.publish, endpoints.replay, VllmPool(2, 100), routers)
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
    until(lambda: routers.held() == {ours(2)})
    engine.send(encode([block(3)]), lose=True)
    until(lambda: routers.held() == {ours(2), ours(3)})
    assert "lost" not in caplog.text
    for name in range(4, 12):
        engine.send(encode([block(name)]), lose=True)
    until(lambda: routers.held() == {ours(name) for name in (9, 10, 11)})
    assert "batches of KV events are lost" in caplog.text
    assert subscriber.healthy()


def test_an_engine_that_cannot_be_routed_by_is_followed_no_longer(
    engine: Publisher, subscriber: EventSubscriber, routers: Routers, caplog: pytest.LogCaptureFixture
) -> None:
    engine.send(encode([block(1)]))
    until(routers.held)
    engine.send(encode([block(2)], rank=3))
    until(lambda: not subscriber.healthy())
    assert "data parallel ranks 0 and 3" in caplog.text
    assert routers.held() == set()


def test_unreadable_or_undeliverable_events_do_not_end_the_listening(endpoints: EventEndpoints) -> None:
    """A malformed batch empties the directory, the next one counts, and a reset is still signalled."""
    calls: list[Sequence[Event]] = []

    def sink(events: Sequence[Event]) -> None:
        calls.append(events)
        raise RuntimeError("full")

    subscriber = EventSubscriber(endpoints.publish, endpoints.replay, VllmPool(2, 100), sink)
    for number, payload in enumerate((encode([block(1)]), b"junk", encode([block(2)]))):
        assert not subscriber.cleared.is_set() or number == 2
        subscriber._take(number, payload)
    assert calls == [[BlocksStored(ours(1))], [CacheCleared()], [BlocksStored(ours(2))]]
    subscriber.cleared.clear()
    subscriber._take(3, encode([AllBlocksCleared(), block(2)]))
    assert subscriber.cleared.is_set()


def test_it_ends_while_a_question_is_unanswered(endpoints: EventEndpoints) -> None:
    """A killed engine answers no more; the replica must end all the same."""
    asked = threading.Event()

    class Asking(EventSubscriber):
        def _catch_up(self, context: Any) -> None:
            asked.set()
            super()._catch_up(context)

    listener = Asking(endpoints.publish, endpoints.replay, VllmPool(2, 8), lambda _: None)
    listener.start()
    assert asked.wait(60)
    listener.stop()
    assert not listener.healthy()
