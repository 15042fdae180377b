"""One engine's KV events, from its sockets to a sink: in order, with gaps repaired, translated.

It owns the listening thread. Batches are numbered, and the engine resends its last ones on request: after a gap, and
after silence, because no later number reveals a loss at the end. After a batch that is lost for good or unreadable,
all blocks are forgotten. If an engine's events are unsupported, the subscriber stops following it.

An engine elsewhere may restart, numbering from 0 again, and need not resend: after its connection broke, all blocks are
forgotten and all that it still keeps is read again.
"""

import logging
import threading
from collections.abc import Callable, Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from router.protocol.events import CacheCleared, Event
from router.vllm_events.batches import END_OF_REPLAY, SEQUENCE_BYTES, MalformedBatch, decode_batch
from router.vllm_events.pool import UnsupportedEvents, VllmPool

_log = logging.getLogger(__name__)

_TICK_MS = 100
_SILENT_TICKS = 10
"""After this long without a batch, the engine is asked for missed batches."""

_ANSWER_TICKS = 50
"""An engine that has not answered by then is asked again later."""

_MAX_QUEUED_BATCHES = 10_000
"""The number of batches that vLLM keeps for a replay. Dropped batches are requested again."""

_MAX_BATCH_BYTES = 64 * 1024 * 1024


class EventSubscriber:
    """Follows one engine for its lifetime. Start it early: batches that the engine no longer keeps then are lost.

    ``sink`` receives the events in order, one call at a time, from the listening thread and ``tell``. ``cleared`` is
    set after the sink received a CacheCleared, and ``failed`` after an error that ends the listening. ``connected``:
    whether the engine publishes to us now; ``connections``: how often that began; ``resent``: whether it answered the
    last request for missed batches; ``batches``: those received; ``unsupported``: why its events cannot be followed, ""
    if they can.
    """

    def __init__(
        self, publish: str, replay: str, pool: VllmPool, sink: Callable[[Sequence[Event]], None], *, far: bool = False
    ) -> None:
        """``publish``, ``replay``: ``endpoint`` and ``replay_endpoint`` of the engine's ``KVEventsConfig``.

        ``far``: the engine is not this process's own: it may restart, may resend nothing, and was not empty before.
        """
        self.cleared = threading.Event()
        self.failed = False
        self.connected, self.connections, self.batches, self.unsupported = False, 0, 0, ""
        self.resent = False
        self._far, self._resends = far, True
        self._publish, self._replay = publish, replay
        self._pool = pool
        self._sink = sink
        self._expected = 0
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="vllm-events", daemon=True)

    def start(self) -> None:
        """Start to listen."""
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
        context = zmq.Context()
        try:
            self._follow(context)
        except UnsupportedEvents as error:
            self.unsupported = str(error)
            _log.error("the directory no longer follows this engine: %s", error)
        except Exception:
            self.failed = True
            _log.exception("the listener of the engine's events stopped")
        finally:
            with self._lock:
                if not self._stopping.is_set():
                    self._deliver(self._pool.forget())
            context.destroy(linger=0)

    def _follow(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        with _socket(context, zmq.SUB) as live, live.get_monitor_socket(_ENDS) as ends:
            live.connect(self._publish)
            live.subscribe(b"")
            silent_ticks = 0
            while not self._stopping.is_set():
                while ends.poll(0):
                    self._turned(recv_monitor_message(ends)["event"] != zmq.EVENT_DISCONNECTED, context)
                if live.poll(_TICK_MS):
                    self._hear(*_numbered(live.recv_multipart()), context)
                    silent_ticks = 0
                elif silent_ticks == _SILENT_TICKS:
                    self._catch_up(context)
                    silent_ticks = 0
                else:
                    silent_ticks += 1

    def _turned(self, connected: bool, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Start anew with an engine that is elsewhere, because it may be another process than before."""
        if self._far and connected != self.connected:
            self._resends = True
            self._forget()
            if connected:
                self._catch_up(context)
        self.connections += connected and not self.connected
        self.connected = connected

    def _forget(self) -> None:
        with self._lock:
            self._expected = -1
            self._deliver(self._pool.forget())

    def _hear(self, number: int, payload: bytes, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.batches += 1
        if self._far and number < self._expected and not self._resends:  # it has restarted
            self._forget()
        if number > self._expected >= 0:
            self._catch_up(context)
        self._take(number, payload)

    def _catch_up(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Request and apply the missed batches, as far as the engine still keeps them and answers."""
        if not self._replay or (self.connected and not self._resends):
            return
        with _socket(context, zmq.DEALER) as replay:
            replay.connect(self._replay)
            replay.send_multipart((b"", max(0, self._expected).to_bytes(SEQUENCE_BYTES, "big")))
            waited_ticks, most_ticks = 0, _SILENT_TICKS if self._far else _ANSWER_TICKS
            while waited_ticks < most_ticks and not self._stopping.is_set():
                if not replay.poll(_TICK_MS):
                    waited_ticks += 1
                    continue
                number, payload = _numbered(replay.recv_multipart())
                if number == END_OF_REPLAY:
                    self.resent = True
                    return
                self.batches += 1
                self._take(number, payload)
            self._resends, self.resent = not self._far, False

    def _take(self, number: int, payload: bytes) -> None:
        """Translate a batch, unless it was handled before. Missing earlier batches are lost for good."""
        if number < self._expected:
            return
        with self._lock:
            if number > self._expected >= 0:
                lost = number - self._expected
                _log.warning("%d batches of KV events are lost: the directory of this engine starts over", lost)
                self._deliver(self._pool.forget())
            self._expected = number + 1
            try:
                self._deliver(self._pool.translate(decode_batch(payload)))
            except MalformedBatch as error:
                _log.warning("a batch of KV events cannot be read; all blocks are forgotten: %s", error)
                self._deliver(self._pool.forget())

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


def _numbered(frames: Sequence[bytes]) -> tuple[int, bytes]:
    """Return number and payload, the last two frames. A topic or an empty frame may precede them."""
    *_, number, payload = frames
    return int.from_bytes(number, "big", signed=True), payload
