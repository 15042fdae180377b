"""The replica's end of the feed: a PUB socket for messages, and a ROUTER socket that answers snapshot requests.

The publisher never waits for a slow listener. The listener loses messages, notices the gap and asks for a snapshot.
"""

import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from threading import Lock, Thread

import zmq

from router.feed.sequencing import MAX_MESSAGE_BYTES, NONCE_BYTES, FeedEndpoint, FeedSequencer
from router.protocol.events import Event
from router.protocol.version import WIRE_VERSION

logger = logging.getLogger(__name__)

_MAX_QUEUED_MESSAGES = 2000
_MAX_STREAMS = 1024
_CHUNKS_A_TURN = 16

MAX_WAITING_BATCHES = 10_000
"""Beyond this, the waiting batches are dropped and counted as lost, and the caches are announced again."""

UNHEALTHY_AFTER_S = 15.0
"""A feed that published nothing for this long, despite waiting events, is broken."""


class FeedPublisher:
    """Publishes one replica's events, best-effort and in order, from its own thread. Any thread may ``put`` them."""

    def __init__(
        self,
        replica_id: str,
        *,
        host: str = "127.0.0.1",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Bind to random ports of ``host``."""
        self._replica_id = replica_id
        self._sequencer = FeedSequencer()
        self._clock = clock
        self._lost = 0
        self._behind_since_s: float | None = None
        self._lock = Lock()
        self._waiting: deque[Sequence[Event]] = deque()
        self._woken = False
        self._stopping = False
        self._bell, self._ear = socket.socketpair()
        self._bell.setblocking(False)
        self._ear.setblocking(False)
        self._thread = Thread(target=self._run, name="feed-publisher", daemon=True)
        self._streams: dict[bytes, Iterator[bytes]] = {}
        self._unsent: dict[bytes, bytes] = {}
        public_key, secret_key = zmq.curve_keypair()
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER)
        for bound in (self._pub, self._router):
            bound.setsockopt(zmq.CURVE_SERVER, 1)
            bound.setsockopt(zmq.CURVE_SECRETKEY, secret_key)
            bound.setsockopt(zmq.LINGER, 0)
            bound.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._pub.setsockopt(zmq.SNDHWM, _MAX_QUEUED_MESSAGES)
        self._router.setsockopt(zmq.RCVHWM, 1000)
        self._router.setsockopt(zmq.SNDHWM, 64)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        ports = [bound.bind_to_random_port(f"tcp://{host}") for bound in (self._pub, self._router)]
        pub_address, snapshot_address = (f"tcp://{host}:{port}" for port in ports)
        self.endpoint = FeedEndpoint(pub_address, snapshot_address, public_key.decode(), WIRE_VERSION)

    @property
    def mirror_drifts(self) -> int:
        """The number of times that published blocks differed from the caches, by a digest or a loss."""
        return self._sequencer.mirror_drifts + self._lost

    def healthy(self) -> bool:
        """Return whether the thread publishes the events passed to ``put``."""
        behind_since_s = self._behind_since_s
        late = behind_since_s is not None and self._clock() - behind_since_s > UNHEALTHY_AFTER_S
        return not late and (self._thread.ident is None or self._thread.is_alive())

    def start(self) -> None:
        """Start publishing."""
        self._thread.start()

    def put(self, events: Sequence[Event]) -> None:
        """Queue events for publication and return at once. After ``stop``, events are dropped."""
        with self._lock:
            if self._stopping:
                return
            if len(self._waiting) >= MAX_WAITING_BATCHES:
                self._waiting.clear()
                self._lost += 1
            self._waiting.append(events)
            if self._behind_since_s is None:
                self._behind_since_s = self._clock()
            self._ring()

    def stop(self, timeout_s: float = 2.0) -> None:
        """Publish the queued events, then close. A repeated call has no effect."""
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
            self._ring()
        if self._thread.ident is None:
            self._context.destroy(linger=0)
        else:
            self._thread.join(timeout_s)
        self._bell.close()
        self._ear.close()

    def _ring(self) -> None:
        if not self._woken:
            self._woken = True
            self._bell.send(b"!")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._ear.fileno(), zmq.POLLIN)
        busy = stopping = False
        try:
            while not stopping:
                ready = dict(poller.poll(1 if busy else None))
                if self._ear.fileno() in ready:
                    with self._lock:
                        self._ear.recv(64)
                        self._woken = False
                        stopping = self._stopping
                        batches, self._waiting = self._waiting, deque()
                    for events in batches:
                        self._publish(events)
                try:
                    busy = self._answer()
                except Exception:
                    logger.exception("a snapshot of %s was not sent", self._replica_id)
                    busy = False
        finally:
            self._context.destroy(linger=0)

    def _publish(self, events: Sequence[Event]) -> None:
        """Send events to the listeners, or count them as lost. Never blocks."""
        try:
            for message in self._sequencer.publish(events):
                self._pub.send(message)
        except Exception:
            logger.exception("events of %s were not published", self._replica_id)
            with self._lock:
                self._lost += 1
        else:
            self._behind_since_s = None

    def _answer(self) -> bool:
        """Accept requests and send each asker some chunks. Return whether chunks are left. Never blocks."""
        self._take_requests()
        for _ in range(_CHUNKS_A_TURN):
            if not self._streams:
                break
            asker, stream = next(iter(self._streams.items()))
            chunk = self._unsent.pop(asker, None) or next(stream, None)
            del self._streams[asker]
            if chunk is None:
                continue
            try:
                self._router.send_multipart([asker, chunk], flags=zmq.NOBLOCK)
            except zmq.Again:  # the asker is slow: its next chunk is sent in a later turn
                self._unsent[asker] = chunk
                self._streams[asker] = stream
                break
            except zmq.ZMQError:  # gone
                continue
            self._streams[asker] = stream
        return bool(self._streams)

    def _take_requests(self) -> None:
        for _ in range(_MAX_STREAMS):
            try:
                frames = self._router.recv_multipart(flags=zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 2 or len(frames[1]) != NONCE_BYTES or len(self._streams) >= _MAX_STREAMS:
                continue
            asker, nonce = frames
            self._unsent.pop(asker, None)
            self._streams[asker] = self._sequencer.snapshot(nonce)
