"""The order of one engine's KV events: each batch once, gaps repaired or forgotten, translated. Uses no socket.

Batches are numbered. After a batch that is lost for good or unreadable, all blocks are forgotten. An engine elsewhere
may restart, numbering from 0 again, and need not resend: after its connection broke, or it named itself anew, all
blocks are forgotten and all that it still keeps is read again. Nothing that it sends ends the listening: one whose
events are unsupported is heard again once it has connected anew.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from router.protocol.events import CacheCleared, Event
from router.vllm_events.batches import MAX_SEQUENCE_BYTES, SEQUENCE_BYTES, MalformedBatch, decode_batch
from router.vllm_events.pool import FollowedPool, UnsupportedEvents

_log = logging.getLogger(__name__)

MAX_BEAT_BYTES = 64
"""A batch without events is no larger."""

COMPLAIN_S = 60.0
"""The least time between two warnings about one engine's batches."""


class BatchOrder:
    """Hands an engine's batches to its pool, and the pool's events to ``sink``, one call at a time.

    ``cleared`` is set after the sink received a CacheCleared. ``connected``: whether the engine publishes to us now;
    ``connections``: how often that began; ``resent``: whether it answered the last request for missed batches;
    ``batches``: those received that had events; ``unsupported``: why its events cannot be followed, "" if they can.
    """

    def __init__(
        self,
        pool: FollowedPool,
        sink: Callable[[Sequence[Event]], None],
        *,
        far: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``far``: the engine is not this process's own: it may restart, resend nothing, and was not empty before."""
        self.cleared = threading.Event()
        self.connected, self.connections, self.batches, self.unsupported = False, 0, 0, ""
        self.resent = False
        self.resends = True
        """Whether it may be asked for missed batches."""
        self.expected = 0
        """The number of the next batch, -1 if any may be."""
        self._far = far
        self._pool = pool
        self._sink = sink
        self._clock = clock
        self._complained_s = float("-inf")
        self._publisher = b""
        self._beat: int | None = None
        """The number of the last batch, if it had no events."""
        self._lock = threading.Lock()

    def catch_up(self) -> None:
        """Apply the missed batches, as far as the engine still keeps them and answers: here it never does."""

    def tell(self, *, anew: bool) -> None:
        """Send a digest of the pool's known blocks to the sink. ``anew``: send every block before it."""
        with self._lock:
            self._deliver([*(self._pool.snapshot() if anew else ()), self._pool.digest()])

    def _unfollow(self, error: UnsupportedEvents) -> None:
        self.unsupported = str(error)
        _log.error("the directory no longer follows this engine: %s", error)

    def turned(self, connected: bool) -> None:
        """Note a connection or its end: an engine elsewhere may then be another process than before."""
        if self._far and connected != self.connected:
            self.resends, self._publisher = True, b""
            self._forget()
            if connected:
                self.unsupported = ""
                self.catch_up()
        self.connections += connected and not self.connected
        self.connected = connected

    def _forget(self) -> None:
        with self._lock:
            self.expected = -1
            self._deliver(self._pool.forget())

    def received(self, frames: Sequence[bytes]) -> None:
        """Read a published message."""
        try:
            message = message_of(frames)
        except MalformedBatch as error:
            self._complain("a message has no batch of KV events; all blocks are forgotten: %s", error)
            self._forget()
            return
        if message.publisher and message.publisher != self._publisher:
            if self._publisher:  # another process at the same address
                self._forget()
            self._publisher = message.publisher
        self.hear(message.number, message.payload)

    def hear(self, number: int, payload: bytes) -> None:
        """Take a published batch, after those that were missed before it."""
        if self._far and number < self.expected and not self.resends and not _beats(payload):  # it has restarted
            self._forget()
        if number > self.expected >= 0:
            self.catch_up()
        self.take(number, payload)

    def take(self, number: int, payload: bytes) -> None:
        """Translate a batch, unless it was handled before. Missing earlier batches are lost for good.

        A batch without events is a sign of life. Whether the next one has its number or the following one is not known.
        """
        beats = _beats(payload)
        if self.unsupported or (number < self.expected and (beats or number != self._beat)):
            return
        with self._lock:
            if number > self.expected >= 0:
                lost = number - self.expected
                self._complain("%d batches of KV events are lost: the directory of this engine starts over", lost)
                self._deliver(self._pool.forget())
            self.expected, self._beat = number + 1, number if beats else None
            if beats:
                return
            self.batches += 1
            try:
                self._deliver(self._pool.translate(decode_batch(payload)))
            except MalformedBatch as error:
                self._complain("a batch of KV events cannot be read; all blocks are forgotten: %s", error)
                self._deliver(self._pool.forget())
            except UnsupportedEvents as error:
                if not self._far:
                    raise
                self._unfollow(error)
                self._deliver(self._pool.forget())
            except Exception:  # of this batch alone: the next one may be good
                self._complain("a batch of KV events failed; all blocks are forgotten", exc_info=True)
                self._deliver(self._pool.forget())

    def _complain(self, sentence: str, *values: object, exc_info: bool = False) -> None:
        """Warn, but not each time: an engine may send thousands of bad batches."""
        now_s = self._clock()
        if now_s - self._complained_s >= COMPLAIN_S:
            self._complained_s = now_s
            _log.warning(sentence, *values, exc_info=exc_info)

    def _deliver(self, events: Sequence[Event]) -> None:
        if not events:
            return
        try:
            self._sink(events)
        except Exception:
            _log.exception("the event sink failed; %d cache events are lost", len(events))
        if CacheCleared() in events:
            self.cleared.set()


@dataclass(frozen=True, slots=True)
class KvMessage:
    """A numbered batch. ``publisher``: the name of the engine's process behind the number, b"" if it has none."""

    number: int
    payload: bytes
    publisher: bytes = b""


def _beats(payload: bytes) -> bool:
    """Return whether a payload is a batch without events."""
    with suppress(MalformedBatch):
        return not payload or (len(payload) <= MAX_BEAT_BYTES and not decode_batch(payload).events)
    return False


def message_of(frames: Sequence[bytes]) -> KvMessage:
    """Return a message from its last two frames; a topic or an empty frame may precede them. Raises MalformedBatch."""
    if len(frames) < 2 or not SEQUENCE_BYTES <= len(frames[-2]) <= MAX_SEQUENCE_BYTES:
        raise MalformedBatch(f"a message has frames of {', '.join(str(len(frame)) for frame in frames[:8])} bytes")
    number, publisher = frames[-2][:SEQUENCE_BYTES], frames[-2][SEQUENCE_BYTES:]
    return KvMessage(int.from_bytes(number, "big", signed=True), frames[-1], publisher)
