"""Records traffic off the request path: a bounded queue, and a thread that disguises, encodes and writes its lines.

Whatever fails costs lines, which are counted, and never a request. Names and block hashes leave this process only in
the form that ``RecordingKey`` gives them.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import msgspec

from router.protocol.block_hash import HASH_BYTES
from router.protocol.samples import Sample
from serve_app.config.traffic import TrafficLogConfig
from serve_app.traffic.log_file import LogFile, WriteCall
from serve_app.traffic.record import VERSION, Header, RecordedModel, ReplicaChange, TrafficRequest
from serve_app.traffic.recording_key import RecordingKey, every

logger = logging.getLogger(__name__)

FLUSH_S = 0.25
"""How long a line waits for others: so long ago is the last line after a SIGKILL."""
MAX_LINES, MAX_BYTES = 16_384, 64 << 20
"""What waits for the thread: lines, and bytes of their block hashes."""
CHUNK_LINES, CHUNK_BYTES = 64, 16_384 * HASH_BYTES
"""What the thread encodes at once: while it does, the event loop may have to wait."""
MAX_PARENTS = 65_536
"""The prompts that a later one is known to continue."""

LossReason = Literal["queue", "disk", "fault"]
_LOST = "warmpath_traffic_lost_total"


class TrafficLine(NamedTuple):
    """A request as it is known inside, with names in clear. ``arrived_s``, ``ended_s``: by ``time.perf_counter``."""

    request: TrafficRequest
    block_hashes: bytes
    arrived_s: float
    ended_s: float


class TrafficCounts:
    """The lines of an ingress' recordings, written and lost. Any thread may count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.written = 0
        self.lost = Counter[LossReason]()

    def wrote(self, lines: int) -> None:
        """Count written lines."""
        with self._lock:
            self.written += lines

    def lose(self, lines: int, reason: LossReason) -> None:
        """Count lost lines. ``queue``: the disk is too slow; ``disk``: it takes none; ``fault``: ours."""
        with self._lock:
            self.lost[reason] += lines

    def samples(self) -> Iterator[Sample]:
        """Yield the counts as metrics."""
        yield "warmpath_traffic_lines_total", (), float(self.written)
        for reason in get_args(LossReason):
            yield _LOST, (("reason", reason),), float(self.lost[reason])


class _Earlier(NamedTuple):
    request: str
    tokens: int
    ended_s: float


class Parents:
    """The latest prompts by their last id, to find which of them a prompt continues."""

    def __init__(self, most: int = MAX_PARENTS) -> None:
        self._most = most
        self._by_last_id: OrderedDict[int, _Earlier] = OrderedDict()

    def of(self, ids: list[int], tokens: int, arrived_s: float) -> str:
        """Return the longest shorter prompt that this one begins with, whose answer had ended; "" for none."""
        for earlier in filter(None, map(self._by_last_id.get, reversed(ids))):
            if earlier.tokens < tokens and earlier.ended_s <= arrived_s:
                return earlier.request
        return ""

    def add(self, ids: list[int], request: str, tokens: int, ended_s: float) -> None:
        """Know a prompt whose answer has ended."""
        if ids:
            self._by_last_id[ids[-1]] = _Earlier(request, tokens, ended_s)
            self._by_last_id.move_to_end(ids[-1])
            if len(self._by_last_id) > self._most:
                self._by_last_id.popitem(last=False)


class Recording:
    """One recording of one ingress: from ``use`` on, what was added is written. Its methods are the event loop's.

    ``path``: the file; ``block_sizes``: of each model. ``facts``: of the models, for the next header. ``write``: as
    ``os.write``.
    """

    def __init__(
        self,
        settings: TrafficLogConfig,
        path: Path,
        writer: str,
        block_sizes: Mapping[str, int],
        counts: TrafficCounts,
        write: WriteCall = os.write,
    ) -> None:
        self.facts: Mapping[str, RecordedModel] = {}
        self.began_s, self._began_unix_s = time.perf_counter(), time.time()
        self._writer, self._counts = writer, counts
        self._block_tokens = settings.tokens_of_a_block(set(block_sizes.values()))
        self._blocks_of_an_id = {model: self._block_tokens // size for model, size in block_sizes.items()}
        self._queue: deque[TrafficLine | ReplicaChange] = deque()
        # Each is written by one thread alone.
        self._added_bytes = self._taken_bytes = 0
        self._key: RecordingKey | None = None
        self._next_key: RecordingKey | None = None
        beside = path.with_name(f"{settings.path.stem}.{writer}{path.suffix}")
        self._file = LogFile(path, settings.max_bytes, settings.keep, self._header, write, beside)
        self._parents = Parents()
        self._encoder = msgspec.json.Encoder()
        self._failing = False
        self._news, self._stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="traffic log", daemon=True)
        self._thread.start()

    def ms_of(self, at_s: float) -> float:
        """Return the timestamp of a time of ``time.perf_counter``."""
        return round((at_s - self.began_s) * 1e3, 3)

    def use(self, key: RecordingKey) -> None:
        """Write with this key from now on, in a file of its own."""
        self._next_key = key
        self._news.set()

    def add(self, line: TrafficLine | ReplicaChange) -> None:
        """Add a line, unless too much waits."""
        size = len(line.block_hashes) if isinstance(line, TrafficLine) else 0
        if len(self._queue) >= MAX_LINES or self._added_bytes - self._taken_bytes + size > MAX_BYTES:
            self._counts.lose(1, "queue")
            return
        self._added_bytes += size
        self._queue.append(line)
        if not self._news.is_set():
            self._news.set()

    def stop(self) -> None:
        """Write what was added, and forget the key. Needs a key; does not wait."""
        self._stopped.set()
        self._news.set()

    def join(self, timeout_s: float) -> None:
        """Wait until all is written, at most so long; blocks."""
        self._thread.join(timeout_s)

    # The thread.

    def _run(self) -> None:
        stopped = False
        while not stopped:
            self._news.wait()
            stopped = self._stopped.wait(FLUSH_S)
            self._news.clear()
            self._turn()
            while self._key is not None and self._queue:
                lines = self._chunk()
                self._turn()  # a key that came before one of them
                self._write(lines, self._key)
                time.sleep(0)  # the event loop's turn
        with suppress(OSError):
            self._file.close()
        self._key = self._next_key = None

    def _turn(self) -> None:
        """Begin a file with the key that is to be used, if it is another one."""
        if self._next_key is not self._key:
            self._key, self._parents = self._next_key, Parents()
            with suppress(OSError):
                self._file.close()
            self._attempt(self._file.open)

    def _chunk(self) -> list[TrafficLine | ReplicaChange]:
        lines: list[TrafficLine | ReplicaChange] = []
        size = 0
        while self._queue and len(lines) < CHUNK_LINES and size < CHUNK_BYTES:
            line = self._queue.popleft()
            lines.append(line)
            size += len(line.block_hashes) if isinstance(line, TrafficLine) else 0
        self._taken_bytes += size
        return lines

    def _write(self, lines: list[TrafficLine | ReplicaChange], key: RecordingKey) -> None:
        try:
            data = self._encoder.encode_lines(self._disguised(lines, key))
        except Exception:  # of lines that cannot be written, no name may be
            logger.exception("lines of traffic cannot be encoded")
            self._counts.lose(len(lines), "fault")
            return
        if self._attempt(lambda: self._file.write(data)):
            self._counts.wrote(len(lines))
        else:
            self._counts.lose(len(lines), "disk")

    def _attempt(self, write: Callable[[], object]) -> bool:
        try:
            write()
        except (OSError, ValueError) as error:  # ValueError: no file can have this name
            if not self._failing:
                why = getattr(error, "strerror", None) or error
                logger.error(
                    "traffic_log: %s cannot be written (%s); requests are served, and their lines are lost until it "
                    "can: free space, let this user write there, or set another path with user_config",
                    self._file.path,
                    why,
                )
            self._failing = True
            return False
        if self._failing:
            logger.warning("traffic_log: %s is written again", self._file.path)
        self._failing = False
        return True

    def _disguised(
        self, lines: list[TrafficLine | ReplicaChange], key: RecordingKey
    ) -> Iterator[TrafficRequest | ReplicaChange]:
        """Yield the lines as they are written. One run of the cipher is for all."""
        chosen = [self._chosen(line) if isinstance(line, TrafficLine) else b"" for line in lines]
        ids, at = key.ids(b"".join(chosen)), 0
        for line, hashes in zip(lines, chosen, strict=True):
            if not isinstance(line, TrafficLine):
                yield msgspec.structs.replace(line, replicas=[key.name("replica", one) for one in line.replicas])
                continue
            end = at + len(hashes) // HASH_BYTES
            yield self._disguise(line, ids[at:end], key)
            at = end

    def _chosen(self, line: TrafficLine) -> bytes:
        return every(line.block_hashes, self._blocks_of_an_id.get(line.request.model, 1))

    def _disguise(self, line: TrafficLine, ids: list[int], key: RecordingKey) -> TrafficRequest:
        request = line.request
        request.hash_ids = ids
        request.id = key.name("request", request.id)
        request.tenant = key.name("tenant", request.tenant)
        request.adapter = key.name("adapter", request.adapter)
        request.session = key.name("session", request.session)
        request.replica = key.name("replica", request.replica)
        request.timestamp = self.ms_of(line.arrived_s)
        request.duration_ms = round((line.ended_s - line.arrived_s) * 1e3, 3)
        request.parent = self._parents.of(ids, request.input_length, line.arrived_s)
        self._parents.add(ids, request.id, request.input_length, line.ended_s)
        return request

    def _header(self) -> bytes:
        assert self._key is not None
        header = Header(
            warmpath_traffic=VERSION,
            recording=self._key.public,
            started_s=self._began_unix_s,
            block_tokens=self._block_tokens,
            writer=self._writer,
            models=dict(self.facts),
        )
        return self._encoder.encode(header) + b"\n"
