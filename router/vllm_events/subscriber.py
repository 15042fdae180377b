"""One engine's KV events from its sockets, in a thread. See ``order.py`` for what becomes of them.

The engine resends its last batches on request: after a gap, and after silence, because no later number reveals a loss
at the end. If an engine's events are unsupported, the subscriber stops following it.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from router.background import LOOPS
from router.protocol.events import Event
from router.vllm_events.batches import END_OF_REPLAY, SEQUENCE_BYTES, MalformedBatch
from router.vllm_events.order import BatchOrder, message_of
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

AGAIN_S = 1.0
"""The pause before a listener that failed begins anew."""


class EventSubscriber(BatchOrder):
    """Follows one engine for its lifetime. Start it early: batches that the engine no longer keeps then are lost.

    The sink receives the events in order, from the listening thread and ``tell``. ``failed``: the error after which the
    listening pauses, "" while it goes on.
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
        """``publish``, ``replay``: ``endpoint`` and ``replay_endpoint`` of the engine's ``KVEventsConfig``."""
        super().__init__(pool, sink, far=far, clock=clock)
        self.failed = ""
        self._publish, self._replay = publish, replay
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
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

    def _listen(self) -> None:
        while not self._stopping.is_set():
            context = self._context = zmq.Context()
            try:
                self.failed = ""
                self._follow(context)
            except UnsupportedEvents as error:
                self._unfollow(error)
                return
            except Exception as error:
                _log.exception("the listener of the engine's events failed; it begins anew")
                self.failed = type(error).__name__
                LOOPS.failed(self._listen.__qualname__, self.failed)
            finally:
                self.connected = False
                with self._lock:
                    if not self._stopping.is_set():
                        self.expected = -1
                        self._deliver(self._pool.forget())
                context.destroy(linger=0)
            self._stopping.wait(AGAIN_S)

    def _follow(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        with _socket(context, zmq.SUB) as live, live.get_monitor_socket(_ENDS) as ends:
            live.connect(self._publish)
            live.subscribe(b"")
            silent_ticks = 0
            while not self._stopping.is_set():
                while ends.poll(0):
                    self.turned(recv_monitor_message(ends)["event"] != zmq.EVENT_DISCONNECTED)
                if live.poll(_TICK_MS):
                    self.received(live.recv_multipart())
                    silent_ticks = 0
                elif silent_ticks == _SILENT_TICKS:
                    self.catch_up()
                    silent_ticks = 0
                else:
                    silent_ticks += 1

    def catch_up(self) -> None:
        """See ``BatchOrder``."""
        if self._context is not None:
            self.request_missed(self._context)

    def request_missed(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Request and apply the missed batches, as far as the engine still keeps them and answers."""
        if not self._replay or self.unsupported or (self.connected and not self.resends):
            return
        with _socket(context, zmq.DEALER) as replay:
            replay.connect(self._replay)
            replay.send_multipart((b"", max(0, self.expected).to_bytes(SEQUENCE_BYTES, "big")))
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
                self.take(message.number, message.payload)
            self.resends, self.resent = not self._far, False


_ENDS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)  # an unanswered request must not delay the shutdown
    socket.setsockopt(zmq.RCVHWM, _MAX_QUEUED_BATCHES)
    socket.setsockopt(zmq.MAXMSGSIZE, _MAX_BATCH_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, 20)
    return socket
