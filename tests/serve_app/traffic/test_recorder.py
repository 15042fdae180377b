"""What is recorded of requests, and what a slow or broken disk costs."""

import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.config.traffic import TrafficLogConfig
from serve_app.traffic import recorder
from serve_app.traffic.reader import read_traffic
from serve_app.traffic.record import Header, RecordedModel, ReplicaChange, TrafficRequest
from serve_app.traffic.recorder import CHUNK_LINES, MAX_LINES, Parents, Recording, TrafficCounts, TrafficLine
from serve_app.traffic.recording_key import KEY_BYTES, KeyOffer, RecordingKey
from tests.harness.eventually import eventually

PATIENCE_S = 30
HASHES = bytes(range(64))
NAMES = ("acme", "the adapter", "my session", "request-1", "Replica#1")


def line(number: int = 1, hashes: bytes = HASHES, tokens: int = 70, at_s: float | None = None) -> TrafficLine:
    now_s = time.perf_counter() if at_s is None else at_s
    request = TrafficRequest(
        timestamp=0.0, input_length=tokens, output_length=number, id=f"request-{number}", tenant="acme", model="m",
        adapter="the adapter", session="my session", replica="Replica#1", ttft_ms=5.0,
    )  # fmt: skip
    return TrafficLine(request, hashes, now_s, now_s + 0.01)


def key(number: int = 1) -> RecordingKey:
    return RecordingKey(KeyOffer(0.0, bytes([number]) * KEY_BYTES, ""))


def recording(path: Path, counts: TrafficCounts | None = None, write: Any = os.write, **more: Any) -> Recording:
    made = Recording(
        TrafficLogConfig(path=path, **more), path, "writer", {"m": 16}, counts or TrafficCounts(), write=write
    )
    made.facts = {"m": RecordedModel(engine="simulated", replicas=2)}
    return made


def ended(made: Recording) -> None:
    made.stop()
    made.join(PATIENCE_S)
    assert not made._thread.is_alive()


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [msgspec.json.decode(one) for one in path.read_bytes().splitlines()]


def test_a_file_tells_numbers_and_no_names(tmp_path: Path) -> None:
    """Its header, its requests with ids, and the replicas; nothing before there is a key."""
    path, counts = tmp_path / "traffic.jsonl", TrafficCounts()
    made = recording(path, counts)
    made.add(ReplicaChange(timestamp=0.0, replicas=["Replica#1", "Replica#2"], model="m"))
    made.add(line())
    assert not path.exists()
    made.use(key())
    ended(made)
    header, change, request = lines_of(path)
    told = msgspec.convert(header, Header)
    assert (told.recording, told.writer, told.block_tokens) == (key().public, "writer", 16)
    assert told.models["m"].replicas == 2
    assert request["hash_ids"] == key().ids(HASHES)
    assert request["replica"] in change["replicas"]
    assert (request["model"], request["input_length"], request["output_length"]) == ("m", 70, 1)
    assert request["duration_ms"] == pytest.approx(10.0)
    written = path.read_text()
    assert not [name for name in NAMES if name in written] and (bytes([1]) * KEY_BYTES).hex() not in written
    assert counts.written == 2 and not counts.lost.total()
    assert next(counts.samples()) == ("warmpath_traffic_lines_total", (), 2.0)
    assert read_traffic([path]).prompt_tokens.tolist() == [70]


def test_another_key_begins_another_file(tmp_path: Path) -> None:
    """So that no file has ids of two keys; the two share none."""
    path, counts = tmp_path / "traffic.jsonl", TrafficCounts()
    made = recording(path, counts)
    made.use(key(1))
    made.add(line(1))
    eventually(lambda: counts.written == 1)
    made.use(key(2))
    made.add(line(2))
    ended(made)
    (old, first), (new, second) = lines_of(tmp_path / "traffic.jsonl.1"), lines_of(path)
    assert (old["recording"], new["recording"]) == (key(1).public, key(2).public)
    for name in ("id", "tenant", "session", "adapter", "replica"):
        assert first[name] != second[name]
    assert not {*first["hash_ids"]} & {*second["hash_ids"]}


def test_coarse_ids(tmp_path: Path) -> None:
    """Every second block's id, of a file that says so."""
    made = recording(tmp_path / "t", block_tokens=32)
    made.use(key())
    made.add(line())
    ended(made)
    header, request = lines_of(tmp_path / "t")
    assert header["block_tokens"] == 32
    assert request["hash_ids"] == key().ids(HASHES)[1::2]
    with pytest.raises(ValueError, match="multiple of block_size, 16"):
        recording(tmp_path / "t", block_tokens=24)


def test_a_disk_that_hangs_costs_lines_and_nothing_else(tmp_path: Path) -> None:
    """What waits is bounded, by lines and by bytes; who adds never waits; then all of it is written."""
    go, hangs, counts = threading.Event(), threading.Event(), TrafficCounts()

    def write(fd: int, data: bytes) -> int:
        if b"input_length" in data:
            hangs.set()
            assert go.wait(PATIENCE_S)
        return os.write(fd, data)

    made = recording(tmp_path / "t", counts, write)
    made.use(key())
    made.add(line())
    assert hangs.wait(PATIENCE_S)
    for number in range(MAX_LINES + 100):
        made.add(line(number))
    assert len(made._queue) == MAX_LINES and counts.lost == {"queue": 100}
    large = recording(tmp_path / "large", more := TrafficCounts(), write)
    for _ in range(70):
        large.add(line(hashes=bytes(1 << 20)))
    assert len(large._queue) == recorder.MAX_BYTES >> 20 and more.lost == {"queue": 6}
    large._queue.clear()
    go.set()
    ended(made)
    assert counts.written == MAX_LINES + 1 == len(lines_of(tmp_path / "t")) - 1
    large.use(key())
    ended(large)


class Heard(logging.Handler):
    """Hears each record of a logger once, whatever handlers other tests have left above it."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())


@pytest.fixture
def heard() -> Iterator[Heard]:
    logger, handler = logging.getLogger("serve_app.traffic.recorder"), Heard()
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def test_a_disk_that_refuses_costs_lines_until_it_does_not(tmp_path: Path, heard: Heard) -> None:
    """One sentence says so, with what to do, and one that it is over."""
    full, counts = threading.Event(), TrafficCounts()

    def write(fd: int, data: bytes) -> int:
        if full.is_set():
            raise OSError(28, "No space left on device")
        return os.write(fd, data)

    made = recording(tmp_path / "t", counts, write)
    made.use(key())
    eventually((tmp_path / "t").exists)
    full.set()
    for number in range(3):
        made.add(line(number))
        eventually(lambda at=number: counts.lost["disk"] == at + 1)
    full.clear()
    made.add(line(9))
    ended(made)
    assert [one["output_length"] for one in lines_of(tmp_path / "t")[1:]] == [9]
    assert counts.written == 1
    told = heard.told
    assert len(told) == 2 and "No space left on device" in told[0] and "free space" in told[0] and "again" in told[1]


@pytest.mark.parametrize("where", ["nowhere/\0/t", "taken/t"])
def test_a_path_that_cannot_be_is_told(tmp_path: Path, where: str, caplog: pytest.LogCaptureFixture) -> None:
    """And counted."""
    (tmp_path / "taken").write_text("a file, not a folder")
    counts = TrafficCounts()
    made = recording(tmp_path / where, counts)
    made.use(key())
    made.add(line())
    ended(made)
    assert counts.lost == {"disk": 1} and counts.written == 0
    assert "another path" in caplog.text


def test_a_line_that_cannot_be_encoded_costs_its_chunk(tmp_path: Path) -> None:
    """The thread goes on."""
    counts = TrafficCounts()
    made = recording(tmp_path / "t", counts)
    broken = line()
    broken.request.end = object()  # type: ignore[assignment]
    made.use(key())
    made.add(broken)
    eventually(lambda: counts.lost["fault"] == 1)
    made.add(line())
    ended(made)
    assert counts.written == 1


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(0, 3)), max_size=12))
def test_a_prompts_parent_is_the_longest_that_it_continues(prompts: list[tuple[list[int], int]]) -> None:
    """The oracle compares whole prefixes: of shorter prompts whose answers had ended, the longest."""
    parents, before = Parents(), []
    for number, (blocks, running) in enumerate(prompts):
        ids = [hash(tuple(blocks[: end + 1])) for end in range(len(blocks))]
        arrived_s = float(number - running)
        fitting = [
            (len(earlier), at)
            for at, earlier in enumerate(before)
            if blocks[: len(earlier)] == earlier and len(earlier) < len(blocks)
            if _last(before, at) and at + 0.5 <= arrived_s
        ]
        assert parents.of(ids, 16 * len(blocks), arrived_s) == (str(max(fitting)[1]) if fitting else "")
        parents.add(ids, str(number), 16 * len(blocks), number + 0.5)
        before.append(blocks)


def _last(before: list[list[int]], at: int) -> bool:
    return before[at] not in before[at + 1 :]


def test_parents_are_bounded() -> None:
    """The oldest goes."""
    parents = Parents(2)
    for number in range(3):
        parents.add([number], str(number), 1, 0.0)
    assert [parents.of([number, 9], 2, 1.0) for number in range(3)] == ["", "1", "2"]


def test_chunks_are_small(tmp_path: Path) -> None:
    """The event loop waits for the encoding of no more than one."""
    made = recording(tmp_path / "t")
    for _ in range(CHUNK_LINES + 1):
        made.add(line())
    assert len(made._chunk()) == CHUNK_LINES
    made._queue.clear()
    for _ in range(3):
        made.add(line(hashes=bytes(recorder.CHUNK_BYTES)))
    assert len(made._chunk()) == 1
    made._queue.clear()
    made.use(key())
    ended(made)
