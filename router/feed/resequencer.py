"""The receiving half of one replica's feed without its sockets: bytes in, ordered events out.

Owns order and completeness: a snapshot first, then every message once and in sequence; a gap, a malformed message, a
new epoch or silence asks for a snapshot again, with backoff. Memory is bounded, time and randomness are passed in, and
nothing that arrives can raise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import msgspec

from router.feed.messages import NONCE_BYTES, FeedCounters, FeedMessage, decode_chunk, decode_message
from router.protocol.events import CacheCleared, Event, LoadReport, StatsReport

Deliver = Callable[[str, tuple[Event, ...]], None]
"""(epoch, events) of one replica, in order."""

_REMEMBERED_EPOCHS = 16


@dataclass(frozen=True, slots=True)
class ResequencerSettings:
    """``timeout_s`` without a chunk ends a request; requests back off from ``first_`` to ``last_backoff_s``.

    A feed silent for ``silence_s`` is asked for a snapshot, which finds out whether the tail was lost.
    """

    timeout_s: float = 1.0
    first_backoff_s: float = 0.05
    last_backoff_s: float = 5.0
    silence_s: float = 5.0
    max_buffered_messages: int = 1024
    max_buffered_bytes: int = 8 << 20


class FeedResequencer:
    """Turns what arrives of one feed, in whatever order and number, into the events in order."""

    def __init__(
        self,
        replica_id: str,
        epoch: str,
        deliver: Deliver,
        counters: FeedCounters,
        rng: Random,
        now_s: float,
        settings: ResequencerSettings | None = None,
    ) -> None:
        self.replica_id = replica_id
        self.epoch = epoch
        self.settings = settings or ResequencerSettings()
        self._deliver = deliver
        self._counters = counters
        self._rng = rng
        self._past_epochs: deque[str] = deque(maxlen=_REMEMBERED_EPOCHS)
        self._next_seq: int | None = None
        self._buffer: dict[int, tuple[FeedMessage, int]] = {}
        self._buffered_bytes = 0
        self._suspect = True
        self._nonce: bytes | None = None
        self._next_index = 0
        self._progress_s = now_s
        self._heard_s = now_s
        self._retry_at_s = now_s
        self._attempt = 0

    @property
    def live(self) -> bool:
        """Whether everything up to the newest message seen has been delivered."""
        return self._next_seq is not None and not self._buffer and not self._suspect

    def on_delta(self, data: bytes, now_s: float) -> None:
        """Take one published message."""
        self._heard_s = now_s
        self._counters.messages += 1
        try:
            message = decode_message(data)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            self._malformed()
            return
        if message.replica_id != self.replica_id:
            self._malformed()
            return
        if message.epoch != self.epoch:
            if message.epoch in self._past_epochs:
                return
            self._enter_epoch(message.epoch)
        if self._next_seq is not None and message.seq == self._next_seq:
            self._next_seq += 1
            self._deliver(self.epoch, message.events)
            if self._buffer:
                self._drain()
        elif self._next_seq is None or message.seq > self._next_seq:
            if self._next_seq is not None and not self._buffer:
                self._counters.gaps += 1
            self._hold(message, len(data))

    def on_chunk(self, data: bytes, now_s: float) -> None:
        """Take one piece of a snapshot; those not asked for, or asked for before the last request, are ignored."""
        self._heard_s = now_s
        try:
            chunk = decode_chunk(data)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            self._malformed()
            return
        if self._nonce is None or chunk.nonce != self._nonce or chunk.replica_id != self.replica_id:
            return
        if chunk.epoch in self._past_epochs or chunk.index < self._next_index:
            return
        if chunk.index > self._next_index:
            self._nonce = None  # a piece is missing: ask again
            self._suspect = True
            return
        if chunk.index == 0:
            if chunk.epoch != self.epoch:
                self._enter_epoch(chunk.epoch)
            if self._next_seq is not None and chunk.seq < self._next_seq:
                self._nonce = None  # only silence was checked, and nothing is missing
                return
            self._next_seq = None  # what is published from here on waits for the last piece
            self._suspect = True
            self._deliver(self.epoch, (CacheCleared(), *chunk.events))
        elif chunk.epoch != self.epoch:
            return
        else:
            self._deliver(self.epoch, chunk.events)
        self._next_index += 1
        self._progress_s = now_s
        if chunk.last:
            self._counters.snapshots += 1
            self._nonce = None
            self._attempt = 0
            self._suspect = False
            self._next_seq = chunk.seq + 1
            self._drain()

    def poll(self, now_s: float) -> bytes | None:
        """Return the nonce of a snapshot request to send now, None when none is due."""
        settings = self.settings
        if self._nonce is not None:
            if now_s - self._progress_s < settings.timeout_s:
                return None
            self._nonce = None
            self._suspect = True
        if self.live and now_s - self._heard_s < settings.silence_s:
            return None
        if now_s < self._retry_at_s:
            return None
        backoff_s = min(settings.first_backoff_s * 2.0 ** min(self._attempt, 30), settings.last_backoff_s)
        self._attempt += 1
        self._retry_at_s = now_s + backoff_s * (1.0 + self._rng.random())
        if not self.live:
            self._next_seq = None  # from here on messages wait for the snapshot, which may be older than they are
        self._nonce = self._rng.randbytes(NONCE_BYTES)
        self._next_index = 0
        self._progress_s = now_s
        return self._nonce

    def resync(self) -> None:
        """Ask for a snapshot though nothing is known to be missing."""
        self._suspect = True

    def request_unsent(self) -> None:
        """The request just returned by ``poll`` could not be sent: the next one need not wait for its answer."""
        self._nonce = None

    def _malformed(self) -> None:
        self._counters.malformed += 1
        self._suspect = True

    def _enter_epoch(self, epoch: str) -> None:
        """The replica began a new life: what it held is gone."""
        self._past_epochs.append(self.epoch)
        self.epoch = epoch
        self._next_seq = None
        self._suspect = True
        self._buffer.clear()
        self._buffered_bytes = 0
        self._deliver(epoch, (CacheCleared(),))

    def _hold(self, message: FeedMessage, size: int) -> None:
        """Keep a message whose turn has not come. What overflows is a gap that the next snapshot closes."""
        if message.seq in self._buffer:
            return
        self._buffer[message.seq] = (message, size)
        self._buffered_bytes += size
        while (
            len(self._buffer) > self.settings.max_buffered_messages
            or self._buffered_bytes > self.settings.max_buffered_bytes
        ):
            self._buffered_bytes -= self._buffer.pop(min(self._buffer))[1]
        reports = tuple(event for event in message.events if isinstance(event, LoadReport | StatsReport))
        if reports:  # load is useful at once, whatever the blocks wait for
            self._deliver(self.epoch, reports)

    def _drain(self) -> None:
        """Deliver held messages whose turn has come and drop those the snapshot contained."""
        assert self._next_seq is not None
        while self._next_seq in self._buffer:
            message, size = self._buffer.pop(self._next_seq)
            self._buffered_bytes -= size
            self._next_seq += 1
            self._deliver(self.epoch, message.events)
        for seq in [seq for seq in self._buffer if seq < self._next_seq]:
            self._buffered_bytes -= self._buffer.pop(seq)[1]
