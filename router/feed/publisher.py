"""The replica's end of the feed: a PUB socket for messages, a ROUTER socket that answers snapshot requests.

Owns the sockets and a fresh CURVE key pair, and never waits for listeners: one that is too slow loses messages, notices
the gap and asks for a snapshot. FeedPublisher belongs to one thread; FeedPublisherThread is one, fed from any thread.
"""

from __future__ import annotations

import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import Lock, Thread
from uuid import uuid4

import zmq

from router.feed.messages import MAX_MESSAGE_BYTES, NONCE_BYTES, FeedEndpoint
from router.feed.sequencer import FeedSequencer
from router.protocol.events import Event

logger = logging.getLogger(__name__)

_MAX_STREAMS = 1024

MAX_WAITING_BATCHES = 10_000
"""More are not held for a thread that does not come to them: they are lost, and the caches are announced anew."""

UNHEALTHY_AFTER_S = 15.0
"""A feed that published nothing for so long, though there was something, is broken."""


class FeedPublisher:
    """Publishes one replica's events. Every method is for the owning thread only."""

    def __init__(
        self,
        replica_id: str,
        *,
        host: str = "127.0.0.1",
        advertised_host: str = "",
        epoch: str = "",
        max_blocks_per_message: int = 2048,
        max_queued_messages: int = 2000,
    ) -> None:
        """Bind to random ports of ``host``. ``advertised_host``: what others dial, if not ``host``."""
        self.sequencer = FeedSequencer(replica_id, epoch or uuid4().hex, max_blocks_per_message)
        public_key, secret_key = zmq.curve_keypair()
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER)
        for bound in (self._pub, self._router):
            bound.setsockopt(zmq.CURVE_SERVER, 1)
            bound.setsockopt(zmq.CURVE_SECRETKEY, secret_key)
            bound.setsockopt(zmq.SNDHWM, max_queued_messages)
            bound.setsockopt(zmq.LINGER, 0)
            bound.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._router.setsockopt(zmq.RCVHWM, 1000)
        self._router.setsockopt(zmq.SNDHWM, 64)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        ports = [bound.bind_to_random_port(f"tcp://{host}") for bound in (self._pub, self._router)]
        dial = advertised_host or host
        self.endpoint = FeedEndpoint(
            f"tcp://{dial}:{ports[0]}", f"tcp://{dial}:{ports[1]}", public_key.decode(), self.sequencer.epoch
        )
        self._streams: dict[bytes, Iterator[bytes]] = {}
        self._unsent: dict[bytes, bytes] = {}

    @property
    def snapshot_socket(self) -> zmq.Socket[bytes]:
        """The socket to poll for requests, for an owner with a poll loop of its own."""
        return self._router

    def publish(self, events: Iterable[Event]) -> None:
        """Send events to whoever listens; never blocks."""
        for message in self.sequencer.publish(events):
            self._pub.send(message)

    def answer(self, max_chunks: int = 16) -> bool:
        """Take waiting snapshot requests and send up to ``max_chunks`` chunks; True while chunks are left to send.

        Never blocks. Requests get their chunks in turn.
        """
        self._take_requests()
        for _ in range(max_chunks):
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

    def close(self) -> None:
        """Close the sockets; what is unsent is lost, as at any end of a process."""
        self._context.destroy(linger=0)

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
            self._streams[asker] = self.sequencer.snapshot(nonce)


class FeedPublisherThread:
    """A FeedPublisher in a daemon thread of its own; ``put`` from any thread, in order.

    An event that cannot be published is lost, and counted in ``mirror_drifts``; the ones after it are published.
    """

    def __init__(self, publisher: FeedPublisher, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Take over ``publisher``: from ``start`` on nobody else may call it."""
        self._publisher = publisher
        self._clock = clock
        self._losses = 0
        self._behind_since_s: float | None = None
        self.endpoint = publisher.endpoint
        self._lock = Lock()
        self._events: deque[Sequence[Event]] = deque()
        self._woken = False
        self._stopping = False
        self._bell, self._ear = socket.socketpair()
        self._bell.setblocking(False)
        self._ear.setblocking(False)
        self._thread = Thread(target=self._run, name="feed-publisher", daemon=True)

    @property
    def mirror_drifts(self) -> int:
        """How often other blocks were published than the caches hold, by their digests or by a loss (any thread)."""
        return self._publisher.sequencer.mirror_drifts + self._losses

    def healthy(self) -> bool:
        """Say whether the thread publishes what it is handed (any thread)."""
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
            if len(self._events) >= MAX_WAITING_BATCHES:
                self._events.clear()
                self._losses += 1
            self._events.append(events)
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
            self._publisher.close()
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
        poller.register(self._publisher.snapshot_socket, zmq.POLLIN)
        poller.register(self._ear.fileno(), zmq.POLLIN)
        busy = False
        try:
            while True:
                ready = dict(poller.poll(1 if busy else None))
                stopping = False
                if self._ear.fileno() in ready:
                    with self._lock:
                        self._ear.recv(64)
                        self._woken = False
                        stopping = self._stopping
                        batches, self._events = self._events, deque()
                    self._publish(batches)
                try:
                    busy = self._publisher.answer()
                except Exception:
                    logger.exception("a snapshot of %s was not sent", self._publisher.sequencer.replica_id)
                    busy = False
                if stopping:
                    return
        finally:
            self._publisher.close()

    def _publish(self, batches: Iterable[Sequence[Event]]) -> None:
        for events in batches:
            try:
                self._publisher.publish(events)
            except Exception:
                logger.exception("events of %s were not published", self._publisher.sequencer.replica_id)
                with self._lock:
                    self._losses += 1
            else:
                self._behind_since_s = None
