"""One engine's KV events, from its sockets to a sink: in order, repaired, translated; and what the pool holds by them.

Owns the thread that listens. A batch that cannot be read means that all is forgotten; an engine whose events cannot be
routed by at all is followed no longer, and then nothing is held as far as routers know.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import zmq

from router.protocol.events import CacheDigest, Event
from serve_app.cache.prefix.block_index import CachedBlock
from serve_app.engine.protocol import Clock, EventSink
from serve_app.engine.vllm.events.batch_order import BatchOrder, Lost, Ordered
from serve_app.engine.vllm.events.batches import END_OF_REPLAY, SEQUENCE_BYTES, MalformedBatch, decode_batch
from serve_app.engine.vllm.events.endpoints import EventEndpoints
from serve_app.engine.vllm.events.held_blocks import OwnerOf
from serve_app.engine.vllm.events.translator import TranslationCounts, Translator, UnsupportedEvents

_log = logging.getLogger(__name__)

_TICK_MS = 100
_MAX_QUEUED_BATCHES = 10_000
"""As many as vLLM keeps for a replay: what is dropped beyond them is asked for again."""

_MAX_BATCH_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class SubscriberCounts:
    """What a subscriber has seen since its start, in batches; ``malformed`` ones could not be read."""

    replayed_batches: int
    lost_batches: int
    malformed_batches: int
    translation: TranslationCounts


class EventSubscriber:
    """Follows one engine for its life. Start it before the engine, so that it hears the first batch.

    ``sink`` is called with events in order, one call at a time, from the listening thread, ``reset_ended``, ``tell``.
    """

    def __init__(
        self, endpoints: EventEndpoints, translator: Translator, sink: EventSink, *, clock: Clock = time.monotonic
    ) -> None:
        self.refusal = ""
        self._endpoints = endpoints
        self._translator = translator
        self._sink = sink
        self._clock = clock
        self._order = BatchOrder(clock())
        self._lost = self._malformed = 0
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="vllm-events", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def stop(self) -> None:
        """Stop listening; nothing is given to the sink any more. Twice is once."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def healthy(self) -> bool:
        """Whether it listens; False once its thread has ended, as after ``refusal`` (a sentence, else "")."""
        return self._thread.is_alive()

    def known_blocks(self, block_hashes: bytes, most: int) -> int:
        """Return how many of a chain's first ``most`` blocks the pool holds by the events so far (any thread)."""
        with self._lock:
            return self._translator.known_blocks(block_hashes, most)

    def num_blocks(self) -> int:
        """Return how many distinct blocks the pool holds by the events so far (any thread)."""
        with self._lock:
            return self._translator.num_blocks

    def requested(self, block_hashes: bytes, most: int) -> int:
        """Do as ``known_blocks`` for a request that will use them, and count it: hot is what is used (any thread)."""
        with self._lock:
            known = self._translator.known_blocks(block_hashes, most)
            self._translator.held.hit(block_hashes, known)
        return known

    def root_of(self, first_hash: bytes) -> bytes:
        """Return the root under which a chain that begins with this hash is held; b"": none is (any thread)."""
        with self._lock:
            return self._translator.held.root_of(first_hash)

    def entries(self, owner_of: OwnerOf) -> list[CachedBlock]:
        """Return what the pool holds of owners who are known, parents first (any thread)."""
        with self._lock:
            return self._translator.held.entries(owner_of)

    def counts(self) -> SubscriberCounts:
        """Return what was seen so far (any thread)."""
        with self._lock:
            seen = replace(self._translator.counts)
        return SubscriberCounts(self._order.replayed_batches, self._lost, self._malformed, seen)

    def reset_begins(self) -> int:
        """Return the mark for ``reset_ended``; to be called before the engine is asked to reset its cache."""
        with self._lock:
            return self._translator.before_reset()

    def reset_ended(self, mark: int) -> None:
        """Tell at once of a reset that the engine has done: its own word may come hours later (any thread)."""
        with self._lock:
            self._deliver(self._translator.after_reset(mark))

    def tell(self, *, anew: bool) -> None:
        """Give the sink a digest of what the pool holds by the events so far; ``anew``: every block before it."""
        with self._lock:
            held = self._translator.announce() if anew else []
            self._deliver([*held, CacheDigest((self._translator.digest,))])

    def _listen(self) -> None:
        context = zmq.Context()
        try:
            self._follow(context)
        except UnsupportedEvents as error:
            self.refusal = str(error)
            _log.error("the directory knows nothing of this engine any more: %s", error)
        except Exception:
            _log.exception("the listener of the engine's events stopped")
        finally:
            with self._lock:
                if not self._stopping.is_set():
                    self._deliver(self._translator.forget())
            context.destroy(linger=0)

    def _follow(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        live = context.socket(zmq.SUB)
        live.setsockopt(zmq.RCVHWM, _MAX_QUEUED_BATCHES)
        live.setsockopt(zmq.MAXMSGSIZE, _MAX_BATCH_BYTES)
        live.setsockopt(zmq.RECONNECT_IVL, 20)
        live.subscribe(b"")
        live.connect(self._endpoints.publish)
        replay: zmq.Socket[bytes] | None = None
        poller = zmq.Poller()
        poller.register(live, zmq.POLLIN)
        while not self._stopping.is_set():
            ready = dict(poller.poll(_TICK_MS))
            if live in ready:
                number, payload = _numbered(live.recv_multipart())
                self._take(self._order.live(number, payload, self._clock()))
            if replay is not None and replay in ready:
                number, payload = _numbered(replay.recv_multipart())
                if number == END_OF_REPLAY:
                    self._take(self._order.replay_ended(self._clock()))
                else:
                    self._take(self._order.replayed(number, payload))
            first = self._order.ask(self._clock())
            if first is not None:
                if replay is not None:  # a socket of its own for each question: late answers go with the old one
                    poller.unregister(replay)
                    replay.close(linger=0)
                replay = self._ask(context, first)
                poller.register(replay, zmq.POLLIN)

    def _ask(self, context: zmq.Context[zmq.Socket[bytes]], first: int) -> zmq.Socket[bytes]:
        asked = context.socket(zmq.DEALER)
        asked.setsockopt(zmq.RCVHWM, _MAX_QUEUED_BATCHES)
        asked.setsockopt(zmq.LINGER, 0)  # a question that nobody takes any more must not hold up the end
        asked.setsockopt(zmq.MAXMSGSIZE, _MAX_BATCH_BYTES)
        asked.connect(self._endpoints.replay)
        asked.send_multipart((b"", first.to_bytes(SEQUENCE_BYTES, "big")))
        return asked

    def _take(self, batches: Sequence[Ordered]) -> None:
        for batch in batches:
            with self._lock:
                if isinstance(batch, Lost):
                    self._lost += batch.batches
                    _log.warning(
                        "%d batches of KV events are lost: the directory of this engine starts anew", batch.batches
                    )
                    self._deliver(self._translator.forget())
                    continue
                try:
                    self._deliver(self._translator.translate(decode_batch(batch)))
                except MalformedBatch as error:
                    self._malformed += 1
                    _log.warning("a batch of KV events cannot be read; all is forgotten: %s", error)
                    self._deliver(self._translator.forget())

    def _deliver(self, events: Sequence[Event]) -> None:
        if not events:
            return
        try:
            self._sink(events)
        except Exception:
            _log.exception("the event sink failed; %d cache events are lost", len(events))


def _numbered(frames: Sequence[bytes]) -> tuple[int, bytes]:
    """Return number and payload, the last two frames: a topic or an empty frame may go before them."""
    *_, number, payload = frames
    return int.from_bytes(number, "big", signed=True), payload
