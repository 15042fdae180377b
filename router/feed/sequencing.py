"""A feed without its sockets.

Its messages, the sending half (``FeedSequencer``) and the receiving one (``FeedResequencer``).

Sending, a mirror of the held hashes keeps snapshots consistent with sequence numbers, and checks digests. Receiving, a
snapshot comes first, then every message once and in sequence. After a gap, a malformed message or silence it asks for
another snapshot, with backoff. Memory is bounded, and callers pass in time and randomness.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from random import Random

import msgspec

from router.protocol.block_hash import HASH_BYTES, split_chain, xor_of_words
from router.protocol.events import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    CacheDigest,
    Event,
    LoadReport,
    StatsReport,
    TierDigest,
)
from router.protocol.version import UNTOLD, WIRE_VERSION, OtherVersion, check_version

NONCE_BYTES = 8
MAX_MESSAGE_BYTES = 4 << 20
"""A peer that sends a larger message is disconnected."""


class FeedEndpoint(msgspec.Struct, frozen=True):
    """The addresses of a replica's feed, and the CURVE key (Z85) that authenticates it and that clients need.

    ``version``: of all messages of the replica (``router.protocol.version``).
    """

    pub_address: str
    snapshot_address: str
    public_key: str
    version: int = UNTOLD


class FeedMessage(msgspec.Struct, frozen=True, array_like=True):
    """One message of one replica's feed. ``seq`` rises by one with each message."""

    seq: int
    events: tuple[Event, ...]
    version: int = WIRE_VERSION


class SnapshotChunk(msgspec.Struct, frozen=True, array_like=True):
    """One piece of a snapshot, with a bounded number of blocks."""

    seq: int
    nonce: bytes
    index: int
    last: bool
    events: tuple[Event, ...]
    version: int = WIRE_VERSION


@dataclass(slots=True)
class FeedCounters:
    """Counters of all feeds' reading end. ``gaps``: in the message sequence; ``malformed``: rejected messages."""

    gaps: int = 0
    snapshots: int = 0
    malformed: int = 0


encode = msgspec.msgpack.Encoder().encode

decode_message = msgspec.msgpack.Decoder(FeedMessage).decode
decode_chunk = msgspec.msgpack.Decoder(SnapshotChunk).decode
"""Both raise ``msgspec.MsgspecError`` on anything malformed, and do not look at the version."""


class BlockMirror:
    """The hashes a replica holds, by tier, in the order in which they were stored (parents first)."""

    def __init__(self) -> None:
        self._tiers: dict[str, dict[bytes, None]] = {}
        self._xors: dict[str, int] = {}

    def apply(self, event: Event) -> None:
        """Apply one cache event. Other events change nothing."""
        if isinstance(event, BlocksStored):
            blocks = self._tiers.setdefault(event.tier, {})
            new = {block_hash: None for block_hash in split_chain(event.hashes) if block_hash not in blocks}
            blocks.update(new)
            self._toggle(event.tier, new)
        elif isinstance(event, BlocksRemoved):
            blocks = self._tiers.get(event.tier, {})
            self._toggle(event.tier, [one for one in split_chain(event.hashes) if blocks.pop(one, one) is None])
        elif isinstance(event, CacheCleared):
            self._tiers.clear()
            self._xors.clear()

    def holds(self, digest: CacheDigest) -> bool:
        """Return whether the mirror agrees with a digest."""
        digests = {of.tier: of for of in digest.tiers if of.blocks}
        own = {tier: TierDigest(tier, len(blocks), self._xors[tier]) for tier, blocks in self._tiers.items() if blocks}
        return digests == own

    def tiers(self) -> dict[str, bytes]:
        """Return the packed hashes of each tier that has any."""
        return {tier: b"".join(blocks) for tier, blocks in self._tiers.items() if blocks}

    def _toggle(self, tier: str, changed: Iterable[bytes]) -> None:
        self._xors[tier] = self._xors.get(tier, 0) ^ xor_of_words(b"".join(changed))


class FeedSequencer:
    """Numbers and encodes the events of one replica, which has one feed in its lifetime."""

    def __init__(self, max_blocks_per_message: int = 2048) -> None:
        self.seq = 0
        self.mirror = BlockMirror()
        self.mirror_drifts = 0
        """The digests that the mirror disagreed with. They are not published, because routers follow the mirror."""
        self._max_bytes = max_blocks_per_message * HASH_BYTES
        self._latest: dict[type[Event], Event] = {}

    def publish(self, events: Iterable[Event]) -> list[bytes]:
        """Apply events to the mirror and return their messages, usually one, each too small to stall a listener."""
        messages: list[bytes] = []
        batch: list[Event] = []
        room = self._max_bytes
        for event in events:
            self.mirror.apply(event)
            if isinstance(event, CacheDigest) and not self.mirror.holds(event):
                self.mirror_drifts += 1
                continue
            if isinstance(event, LoadReport | StatsReport):
                self._latest[type(event)] = event
            for piece in self._pieces(event):
                size = len(piece.hashes) if isinstance(piece, BlocksStored | BlocksRemoved) else 0
                if size > room:
                    messages.append(self._message(batch))
                    batch, room = [], self._max_bytes
                batch.append(piece)
                room -= size
        if batch:
            messages.append(self._message(batch))
        return messages

    def snapshot(self, nonce: bytes) -> Iterator[bytes]:
        """Return the chunks of a snapshot of the current state. Later events do not change them."""
        return self._chunks(nonce, self.seq, self.mirror.tiers(), tuple(self._latest.values()))

    def _chunks(self, nonce: bytes, seq: int, tiers: dict[str, bytes], reports: tuple[Event, ...]) -> Iterator[bytes]:
        pieces = (piece for tier, hashes in tiers.items() for piece in self._pieces(BlocksStored(hashes, tier)))
        index, events = 0, tuple(islice(pieces, 1))
        while True:
            following = tuple(islice(pieces, 1))
            last = not following
            yield encode(SnapshotChunk(seq, nonce, index, last, events + reports if last else events))
            if last:
                return
            index, events = index + 1, following

    def _pieces(self, event: Event) -> Iterator[Event]:
        if not isinstance(event, BlocksStored | BlocksRemoved) or len(event.hashes) <= self._max_bytes:
            yield event
            return
        for start in range(0, len(event.hashes), self._max_bytes):
            yield type(event)(event.hashes[start : start + self._max_bytes], event.tier)

    def _message(self, events: list[Event]) -> bytes:
        self.seq += 1
        return encode(FeedMessage(self.seq, tuple(events)))


TIMEOUT_S = 1.0
"""A request without a new chunk for this long is abandoned."""

FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.05, 5.0
"""The first and the longest pause between requests, before jitter."""

SILENCE_S = 5.0
"""After this long without a message, a snapshot is requested to find out whether the last messages were lost."""

MAX_HELD_BYTES = 8 << 20
_EARLY_BYTES_A_MESSAGE = 1024

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
        self._early: dict[int, tuple[FeedMessage, int]] = {}
        self._early_bytes = 0
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
            check_version(message.version)
        except (msgspec.MsgspecError, UnicodeDecodeError, OtherVersion):
            self._malformed()
            return
        self._take(message, len(data))

    def on_chunk(self, data: bytes, now_s: float) -> None:
        """Handle one piece of a snapshot. Pieces that do not belong to the last request are ignored."""
        self._heard_s = now_s
        try:
            chunk = decode_chunk(data)
            check_version(chunk.version)
        except (msgspec.MsgspecError, UnicodeDecodeError, OtherVersion):
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
            messages, self._early, self._early_bytes = self._early, {}, 0
            for seq in sorted(messages):
                self._take(*messages[seq])

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
            if message.seq in self._early:
                return
            self._early_bytes += size + _EARLY_BYTES_A_MESSAGE
            if self._early_bytes > MAX_HELD_BYTES:  # dropped messages are a gap that one more snapshot closes
                self._early.clear()
                self._early_bytes = size + _EARLY_BYTES_A_MESSAGE
            self._early[message.seq] = (message, size)
            reports = tuple(event for event in message.events if isinstance(event, LoadReport | StatsReport))
            if reports:  # reports are useful at once, even while blocks wait for a snapshot
                self._deliver(reports)
