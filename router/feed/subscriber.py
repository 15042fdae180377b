"""The router's end of the feeds: follows any number of replicas from one asyncio loop.

It owns a SUB and a DEALER socket for each replica, and passes events to ``deliver`` in order. A slow, dead or hostile
feed delays no other: no call blocks, queues and messages are bounded, and the loop switches to others after every large
message.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

import zmq

from router.background import run_in_background
from router.feed.sequencing import MAX_MESSAGE_BYTES, FeedCounters, FeedEndpoint, FeedResequencer
from router.feed.socket_reader import SocketReader
from router.protocol.events import Event

logger = logging.getLogger(__name__)

_MAX_QUEUED_MESSAGES = 2000
_TICK_S = 0.02
_LARGE_BYTES = 4096
_SMALL_MESSAGES_A_TURN = 16

DeliverFrom = Callable[[str, tuple[Event, ...]], None]
"""(replica_id, events)."""


@dataclass(slots=True)
class _Feed:
    replica_id: str
    endpoint: FeedEndpoint
    resequencer: FeedResequencer
    deltas: SocketReader
    chunks: SocketReader


class FeedSubscriber:
    """Follows feeds. Call every method from its event loop."""

    def __init__(self, deliver: DeliverFrom, counters: FeedCounters) -> None:
        self._deliver = deliver
        self._counters = counters
        self._rng = Random()  # noqa: S311 (nonces only tell answers apart)
        self._context = zmq.Context()
        self._public_key, self._secret_key = zmq.curve_keypair()
        self._feeds: dict[str, _Feed] = {}
        self._ticker: asyncio.Task[None] | None = None

    @property
    def replica_ids(self) -> frozenset[str]:
        """The followed replicas."""
        return frozenset(self._feeds)

    def is_live(self, replica_id: str) -> bool:
        """Whether a followed feed has delivered all its known messages."""
        feed = self._feeds.get(replica_id)
        return feed is not None and feed.resequencer.live

    def resync(self, replica_id: str) -> None:
        """Ask a replica for a snapshot, because its known blocks are wrong. Unknown ids are ignored."""
        feed = self._feeds.get(replica_id)
        if feed is not None:
            feed.resequencer.resync()

    def connect(self, replica_id: str, endpoint: FeedEndpoint) -> None:
        """Follow a replica at its (new) endpoint. Raises ``zmq.ZMQError`` or ``ValueError`` for an unusable one."""
        followed = self._feeds.get(replica_id)
        if followed is not None:
            if followed.endpoint == endpoint:
                return
            self.disconnect(replica_id)
        sub, dealer = self._context.socket(zmq.SUB), self._context.socket(zmq.DEALER)
        try:
            for made in (sub, dealer):
                made.setsockopt(zmq.LINGER, 0)
                made.setsockopt(zmq.RCVHWM, _MAX_QUEUED_MESSAGES)
                made.setsockopt(zmq.SNDHWM, 8)
                made.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
                made.setsockopt(zmq.RECONNECT_IVL, 100)
                made.setsockopt(zmq.RECONNECT_IVL_MAX, 5000)
                made.setsockopt(zmq.CURVE_PUBLICKEY, self._public_key)
                made.setsockopt(zmq.CURVE_SECRETKEY, self._secret_key)
                made.setsockopt(zmq.CURVE_SERVERKEY, endpoint.public_key.encode())
            sub.setsockopt(zmq.SUBSCRIBE, b"")
            sub.connect(endpoint.pub_address)
            dealer.setsockopt(zmq.IMMEDIATE, 1)
            dealer.connect(endpoint.snapshot_address)
        except (zmq.ZMQError, ValueError):
            sub.close(0)
            dealer.close(0)
            raise

        resequencer = FeedResequencer(partial(self._deliver, replica_id), self._counters, self._rng, time.monotonic())
        deltas, chunks = (
            SocketReader(made, partial(self._take, replica_id, take), _SMALL_MESSAGES_A_TURN, _LARGE_BYTES)
            for made, take in ((sub, resequencer.on_delta), (dealer, resequencer.on_chunk))
        )
        self._feeds[replica_id] = _Feed(replica_id, endpoint, resequencer, deltas, chunks)
        if self._ticker is None or self._ticker.done():
            self._ticker = run_in_background(self._tick)

    def disconnect(self, replica_id: str) -> None:
        """Stop following a replica. Unknown ids are ignored."""
        feed = self._feeds.pop(replica_id, None)
        if feed is None:
            return
        feed.deltas.close()
        feed.chunks.close()

    async def close(self) -> None:
        """Stop following all replicas and free the sockets."""
        for replica_id in list(self._feeds):
            self.disconnect(replica_id)
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        self._context.destroy(linger=0)

    def _take(self, replica_id: str, take: Callable[[bytes, float], None], messages: Sequence[bytes]) -> None:
        for data in messages:
            if replica_id not in self._feeds:  # one before it ended this
                return
            try:
                take(data, time.monotonic())
            except Exception:
                self._counters.malformed += 1
                logger.exception("a message of the feed of %s could not be applied", replica_id)

    async def _tick(self) -> None:
        """Request the snapshots that are due, for all feeds in turn."""
        while True:
            now_s = time.monotonic()
            for feed in list(self._feeds.values()):
                try:
                    nonce = feed.resequencer.poll(now_s)
                    if nonce is not None:
                        self._ask(feed, nonce)
                except Exception:  # the other feeds' turns come all the same
                    logger.exception("the feed of %s is not asked for a snapshot", feed.replica_id)
            await asyncio.sleep(_TICK_S)

    def _ask(self, feed: _Feed, nonce: bytes) -> None:
        try:
            feed.chunks.send(nonce)
        except zmq.Again:
            feed.resequencer.request_unsent()  # not connected (yet): retry after the backoff
        except zmq.ZMQError:
            feed.resequencer.request_unsent()
            logger.warning("cannot ask %s for a snapshot", feed.replica_id, exc_info=True)
