"""The feed's data: endpoints, numbered messages and snapshot chunks. A snapshot request is only its nonce."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from router.protocol.events import Event

NONCE_BYTES = 8
MAX_MESSAGE_BYTES = 4 << 20
"""A peer that sends a larger message is disconnected."""


class FeedEndpoint(msgspec.Struct, frozen=True):
    """The addresses of a replica's feed, and the CURVE key (Z85) that authenticates it and that clients need."""

    pub_address: str
    snapshot_address: str
    public_key: str


class FeedMessage(msgspec.Struct, frozen=True, array_like=True):
    """One message of one replica's feed. ``seq`` rises by one with each message."""

    seq: int
    events: tuple[Event, ...]


class SnapshotChunk(msgspec.Struct, frozen=True, array_like=True):
    """One piece of a snapshot, with a bounded number of blocks."""

    seq: int
    nonce: bytes
    index: int
    last: bool
    events: tuple[Event, ...]


@dataclass(slots=True)
class FeedCounters:
    """Counters of all feeds' reading end. ``gaps``: in the message sequence; ``malformed``: rejected messages."""

    gaps: int = 0
    snapshots: int = 0
    malformed: int = 0


encode = msgspec.msgpack.Encoder().encode

decode_message = msgspec.msgpack.Decoder(FeedMessage).decode
decode_chunk = msgspec.msgpack.Decoder(SnapshotChunk).decode
"""Both raise ``msgspec.MsgspecError`` on anything malformed."""
