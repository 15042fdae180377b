"""One engine's KV events, from its sockets to a sink: in order, with gaps repaired, translated.

It owns the listening thread. Batches are numbered, and the engine resends its last ones on request: after a gap, and
after silence, because no later number reveals a loss at the end. After a batch that is lost for good or unreadable,
all blocks are forgotten. If an engine's events are unsupported, the subscriber stops following it.

An engine elsewhere may restart, numbering from 0 again, and need not resend: after its connection broke, or it named
itself anew, all blocks are forgotten and all that it still keeps is read again. Nothing that it sends ends the
listening: one whose events are unsupported is heard again once it has connected anew.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from router.background import LOOPS
from router.protocol.events import CacheCleared, Event
from router.vllm_events.batches import END_OF_REPLAY, MAX_SEQUENCE_BYTES, SEQUENCE_BYTES, MalformedBatch, decode_batch
from router.vllm_events.pool import FollowedPool, UnsupportedEvents

_log = logging.getLogger(__name__)

_TICK_MS = 100
_SILENT_TICKS = 10
"""After this long without a batch, the engine is asked for missed batches."""

_ANSWER_TICKS = 50
"""An engine that has not answered by then is asked again later."""

REPLAY_S = 30.0
"""An engine that has not sent its missed batches by then, however many it sends, does not resend."""

_MAX_BATCH_BYTES = 16 << 20
_MAX_QUEUED_BATCHES = 32
"""More wait in the engine, whose own queue is long: ZeroMQ stops reading. Count and size together bound the memory."""

MAX_BEAT_BYTES = 64
"""A batch without events is no larger."""

AGAIN_S = 1.0
"""The pause before a listener that failed begins anew."""

COMPLAIN_S = 60.0
"""The least time between two warnings about one engine's batches."""


class EventSubscriber:
    """Follows one engine for its lifetime. Start it early: batches that the engine no longer keeps then are lost.

    ``sink`` receives the events in order, one call at a time, from the listening thread and ``tell``. ``cleared`` is
    set after the sink received a CacheCleared. ``failed``: the error after which the listening pauses, "" while it goes
    on. ``connected``: whether the engine publishes to us now; ``connections``: how often that began; ``resent``:
    whether it answered the last request for missed batches; ``batches``: those received that had events;
    ``unsupported``: why its events cannot be followed, "" if they can.
    """

    def __init__(
        self,
        publish: str,
        replay: str,
        pool: FollowedPool,
        sink: Callable[[Sequence[Event]], None],
        *,
        far: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``publish``, ``replay``: ``endpoint`` and ``replay_endpoint`` of the engine's ``KVEventsConfig``.

        ``far``: the engine is not this process's own: it may restart, may resend nothing, and was not empty before.
        """
        self.cleared = threading.Event()
        self.failed = ""
        self.connected, self.connections, self.batches, self.unsupported = False, 0, 0, ""
        self.resent = False
        self._far, self._resends = far, True
        self._publish, self._replay = publish, replay
        self._pool = pool
        self._sink = sink
        self._clock = clock
        self._complained_s = float("-inf")
        self._publisher = b""
        self._expected = 0
        self._beat: int | None = None
        """The number of the last batch, if it had no events."""
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="vllm-events", daemon=True)

    def start(self) -> None:
        """Start to listen."""
        LOOPS.begin(self._listen.__qualname__)
        self._thread.start()

    def stop(self) -> None:
        """Stop listening. The sink receives no more events. A repeated call has no effect."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def healthy(self) -> bool:
        """Return False once the started thread has ended."""
        return self._thread.ident is None or self._thread.is_alive()

    def tell(self, *, anew: bool) -> None:
        """Send a digest of the pool's known blocks to the sink. ``anew``: send every block before it."""
        with self._lock:
            self._deliver([*(self._pool.snapshot() if anew else ()), self._pool.digest()])

    def _listen(self) -> None:
        while not self._stopping.is_set():
            context = zmq.Context()
            try:
                self.failed = ""
                self._follow(context)
            except UnsupportedEvents as error:
                self._unsupported(error)
                return
            except Exception as error:
                _log.exception("the listener of the engine's events failed; it begins anew")
                self.failed = type(error).__name__
                LOOPS.failed(self._listen.__qualname__, self.failed)
            finally:
                self.connected = False
                with self._lock:
                    if not self._stopping.is_set():
                        self._expected = -1
                        self._deliver(self._pool.forget())
                context.destroy(linger=0)
            self._stopping.wait(AGAIN_S)

    def _unsupported(self, error: UnsupportedEvents) -> None:
        self.unsupported = str(error)
        _log.error("the directory no longer follows this engine: %s", error)

    def _follow(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        with _socket(context, zmq.SUB) as live, live.get_monitor_socket(_ENDS) as ends:
            live.connect(self._publish)
            live.subscribe(b"")
            silent_ticks = 0
            while not self._stopping.is_set():
                while ends.poll(0):
                    self._turned(recv_monitor_message(ends)["event"] != zmq.EVENT_DISCONNECTED, context)
                if live.poll(_TICK_MS):
                    self._received(live.recv_multipart(), context)
                    silent_ticks = 0
                elif silent_ticks == _SILENT_TICKS:
                    self._catch_up(context)
                    silent_ticks = 0
                else:
                    silent_ticks += 1

    def _turned(self, connected: bool, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Start anew with an engine that is elsewhere, because it may be another process than before."""
        if self._far and connected != self.connected:
            self._resends, self._publisher = True, b""
            self._forget()
            if connected:
                self.unsupported = ""
                self._catch_up(context)
        self.connections += connected and not self.connected
        self.connected = connected

    def _forget(self) -> None:
        with self._lock:
            self._expected = -1
            self._deliver(self._pool.forget())

    def _received(self, frames: Sequence[bytes], context: zmq.Context[zmq.Socket[bytes]]) -> None:
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
        self._hear(message.number, message.payload, context)

    def _hear(self, number: int, payload: bytes, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        if self._far and number < self._expected and not self._resends and not _beats(payload):  # it has restarted
            self._forget()
        if number > self._expected >= 0:
            self._catch_up(context)
        self._take(number, payload)

    def _catch_up(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Request and apply the missed batches, as far as the engine still keeps them and answers."""
        if not self._replay or self.unsupported or (self.connected and not self._resends):
            return
        with _socket(context, zmq.DEALER) as replay:
            replay.connect(self._replay)
            replay.send_multipart((b"", max(0, self._expected).to_bytes(SEQUENCE_BYTES, "big")))
            waited_ticks, most_ticks = 0, _SILENT_TICKS if self._far else _ANSWER_TICKS
            end_s = self._clock() + REPLAY_S
            while waited_ticks < most_ticks and self._clock() < end_s and not self._stopping.is_set():
                if not replay.poll(_TICK_MS):
                    waited_ticks += 1
                    continue
                try:
                    message = message_of(replay.recv_multipart())
                except MalformedBatch as error:
                    self._complain("an engine resends no batches of KV events: %s", error)
                    break
                if message.publisher and message.publisher != (self._publisher or message.publisher):
                    self.resent = False  # it is of the process before, or of the next one
                    return
                self._publisher = message.publisher or self._publisher
                if message.number == END_OF_REPLAY:
                    self.resent = True
                    return
                self._take(message.number, message.payload)
            self._resends, self.resent = not self._far, False

    def _take(self, number: int, payload: bytes) -> None:
        """Translate a batch, unless it was handled before. Missing earlier batches are lost for good.

        A batch without events is a sign of life. Whether the next one has its number or the following one is not known.
        """
        beats = _beats(payload)
        if self.unsupported or (number < self._expected and (beats or number != self._beat)):
            return
        with self._lock:
            if number > self._expected >= 0:
                lost = number - self._expected
                self._complain("%d batches of KV events are lost: the directory of this engine starts over", lost)
                self._deliver(self._pool.forget())
            self._expected, self._beat = number + 1, number if beats else None
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
                self._unsupported(error)
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


_ENDS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)  # an unanswered request must not delay the shutdown
    socket.setsockopt(zmq.RCVHWM, _MAX_QUEUED_BATCHES)
    socket.setsockopt(zmq.MAXMSGSIZE, _MAX_BATCH_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, 20)
    return socket


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
