"""The receiving half of one replica's feed without its sockets: bytes in, ordered events out.

It ensures order and completeness: a snapshot first, then every message once and in sequence. After a gap, a malformed
message or silence it asks for another snapshot, with backoff. Memory is bounded, and callers pass in time and
randomness. No input can make it raise.
"""

from collections.abc import Callable
from random import Random

import msgspec

from router.feed.messages import NONCE_BYTES, FeedCounters, FeedMessage, decode_chunk, decode_message
from router.protocol.events import CacheCleared, Event, LoadReport, StatsReport

TIMEOUT_S = 1.0
"""A request without a new chunk for this long is abandoned."""

FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.05, 5.0
"""The first and the longest pause between requests, before jitter."""

SILENCE_S = 5.0
"""After this long without a message, a snapshot is requested to find out whether the last messages were lost."""

MAX_HELD_BYTES = 8 << 20
_HELD_BYTES_A_MESSAGE = 1024

Deliver = Callable[[tuple[Event, ...]], None]
"""Receives the events of one replica, in order."""


class FeedResequencer:
    """Turns one feed's received bytes into ordered events."""

    def __init__(self, deliver: Deliver, counters: FeedCounters, rng: Random, now_s: float) -> None:
        self._deliver = deliver
        self._counters = counters
        self._rng = rng
        self._next_seq: int | None = None
        """None: a snapshot is needed. Messages are held until it arrives, because it may be older than they are."""
        self._held: dict[int, tuple[FeedMessage, int]] = {}
        self._held_bytes = 0
        self._nonce: bytes | None = None
        self._next_index = 0
        self._progress_s = self._heard_s = self._retry_at_s = now_s
        self._attempt = 0

    @property
    def live(self) -> bool:
        """Whether everything up to the newest message seen has been delivered."""
        return self._next_seq is not None

    def on_delta(self, data: bytes, now_s: float) -> None:
        """Handle one published message."""
        self._heard_s = now_s
        try:
            message = decode_message(data)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            self._malformed()
            return
        self._take(message, len(data))

    def on_chunk(self, data: bytes, now_s: float) -> None:
        """Handle one piece of a snapshot. Pieces that do not belong to the last request are ignored."""
        self._heard_s = now_s
        try:
            chunk = decode_chunk(data)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            self._malformed()
            return
        if self._nonce is None or chunk.nonce != self._nonce or chunk.index < self._next_index:
            return
        if chunk.index > self._next_index:
            self._nonce = None  # a piece is missing: ask again
            return
        if chunk.index == 0:
            if self._next_seq is not None and chunk.seq < self._next_seq:
                self._nonce = None  # the request was a check after silence, and no message is missing
                return
            self._next_seq = None
            self._deliver((CacheCleared(), *chunk.events))
        else:
            self._deliver(chunk.events)
        self._next_index += 1
        self._progress_s = now_s
        if chunk.last:
            self._counters.snapshots += 1
            self._nonce = None
            self._attempt = 0
            self._next_seq = chunk.seq + 1
            held, self._held, self._held_bytes = self._held, {}, 0
            for seq in sorted(held):
                self._take(*held[seq])

    def poll(self, now_s: float) -> bytes | None:
        """Return the nonce of a snapshot request to send now, or None when none is due."""
        if self._nonce is not None:
            if now_s - self._progress_s < TIMEOUT_S:
                return None
            self._nonce = self._next_seq = None
        if now_s < self._retry_at_s or (self.live and now_s - self._heard_s < SILENCE_S):
            return None
        backoff_s = min(FIRST_BACKOFF_S * 2.0 ** min(self._attempt, 30), LAST_BACKOFF_S)
        self._attempt += 1
        self._retry_at_s = now_s + backoff_s * (1.0 + self._rng.random())
        self._nonce = self._rng.randbytes(NONCE_BYTES)
        self._next_index = 0
        self._progress_s = now_s
        return self._nonce

    def resync(self) -> None:
        """Ask for a snapshot even though no message is known to be missing."""
        self._next_seq = None

    def request_unsent(self) -> None:
        """Record that the request just returned by ``poll`` was not sent, so the next one need not wait for it."""
        self._nonce = None

    def _malformed(self) -> None:
        self._counters.malformed += 1
        self._next_seq = None

    def _take(self, message: FeedMessage, size: int) -> None:
        """Deliver the next message in sequence, drop duplicates, and hold messages that arrive after a gap."""
        if message.seq == self._next_seq:
            self._next_seq += 1
            self._deliver(message.events)
        elif self._next_seq is None or message.seq > self._next_seq:
            self._counters.gaps += self._next_seq is not None
            self._next_seq = None
            if message.seq in self._held:
                return
            self._held_bytes += size + _HELD_BYTES_A_MESSAGE
            if self._held_bytes > MAX_HELD_BYTES:  # dropped messages are a gap that one more snapshot closes
                self._held.clear()
                self._held_bytes = size + _HELD_BYTES_A_MESSAGE
            self._held[message.seq] = (message, size)
            reports = tuple(event for event in message.events if isinstance(event, LoadReport | StatsReport))
            if reports:  # reports are useful at once, even while blocks wait for a snapshot
                self._deliver(reports)
