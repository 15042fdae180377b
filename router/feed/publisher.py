"""The replica's end of the feed: a PUB socket for messages, a ROUTER socket that answers snapshot requests.

A listener that is too slow is not waited for: it loses messages, notices the gap and asks for a snapshot.
"""

import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from threading import Lock, Thread

import zmq

from router.feed.messages import MAX_MESSAGE_BYTES, NONCE_BYTES, FeedEndpoint
from router.feed.sequencer import FeedSequencer
from router.protocol.events import Event

logger = logging.getLogger(__name__)

_MAX_QUEUED_MESSAGES = 2000
_MAX_STREAMS = 1024
_CHUNKS_A_TURN = 16

MAX_WAITING_BATCHES = 10_000
"""More are not held for a thread that does not come to them: they are lost, and the caches are announced anew."""

UNHEALTHY_AFTER_S = 15.0
"""A feed that published nothing for so long, though there was something, is broken."""


class FeedPublisher:
    """Publishes one replica's events, those that it can, from its own thread; ``put`` from any thread, in order."""

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
        self.endpoint = FeedEndpoint(pub_address, snapshot_address, public_key.decode())

    @property
    def mirror_drifts(self) -> int:
        """How often other blocks were published than the caches hold, by their digests or by a loss."""
        return self._sequencer.mirror_drifts + self._lost

    def healthy(self) -> bool:
        """Say whether the thread publishes what it is handed."""
        behind_since_s = self._behind_since_s
        late = behind_since_s is not None and self._clock() - behind_since_s > UNHEALTHY_AFTER_S
        return not late and (self._thread.ident is None or self._thread.is_alive())

    def start(self) -> None:
        """Start publishing."""
        self._thread.start()

    def put(self, events: Sequence[Event]) -> None:
        """Hand over events to be published; returns at once. After ``stop`` they are dropped."""
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
        """Publish what was handed over, then close; again is harmless."""
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
        """Send events to whoever listens, or lose them; never blocks."""
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
        """Take requests and send each asker some chunks; True while chunks are left to send. Never blocks."""
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
            except zmq.Again:  # the asker is slow: it keeps its place at the end of the queue
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
