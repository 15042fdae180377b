"""vLLM's KV events as they come over its socket: bytes in, typed events out. Imports no vllm: a batch is msgpack.

A batch is an array ``[ts, events, data_parallel_rank]``. An event is a map with its name under ``type`` (vLLM from
0.23 on), or an array that begins with it (before). Fields that are not known are ignored, absent ones are None.
Source: vLLM's ``vllm/distributed/kv_events.py``.
"""

from __future__ import annotations

from typing import Any

import msgspec

BlockHash = bytes | int
"""vLLM's name of a block: the 32 bytes of a SHA-256, or 64 bits of it where it was told to cut hashes."""

SEQUENCE_BYTES = 8
"""Of a batch's number, signed and big-endian, in a frame of its own; batches of one engine count from 0."""

END_OF_REPLAY = -1
"""The number after the last batch of a replay."""

MEDIUM_GPU = "GPU"
"""The pool that an engine computes in; vLLM says so on a CPU too."""


class MalformedBatch(ValueError):
    """The bytes are no batch of KV events, or an event in it lacks what it must have."""


class BlockStored(msgspec.Struct, frozen=True, tag="BlockStored"):
    """Blocks that hang one under the other, the first under ``parent_block_hash`` (None: it begins a chain).

    ``token_ids``: those of all the blocks. ``extra_keys``: for each block what its hash covers besides tokens and
    parent: the adapter's name, the salt (a chain's first block only), what images and embeddings are; untagged.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag="BlockRemoved"):
    """One copy of each of these blocks is gone."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag="AllBlocksCleared"):
    """Every block is gone."""


class _BlockStoredArray(BlockStored, frozen=True, array_like=True, tag="BlockStored"):
    """The form before maps."""


class _BlockRemovedArray(BlockRemoved, frozen=True, array_like=True, tag="BlockRemoved"):
    """The form before maps."""


class _AllBlocksClearedArray(AllBlocksCleared, frozen=True, array_like=True, tag="AllBlocksCleared"):
    """The form before maps."""


class UnknownEvent(msgspec.Struct, frozen=True):
    """An event that came after this was written."""

    name: str


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared | UnknownEvent


class KvEventBatch(msgspec.Struct, frozen=True):
    """What one step of an engine did. ``ts``: seconds since 1970, by the engine's clock."""

    ts: float
    events: tuple[KvEvent, ...]
    data_parallel_rank: int | None = None


class _Envelope(msgspec.Struct, frozen=True, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


_decode_envelope = msgspec.msgpack.Decoder(_Envelope).decode
_decode_map = msgspec.msgpack.Decoder(BlockStored | BlockRemoved | AllBlocksCleared).decode
_decode_array = msgspec.msgpack.Decoder(_BlockStoredArray | _BlockRemovedArray | _AllBlocksClearedArray).decode
_KNOWN = {"BlockStored", "BlockRemoved", "AllBlocksCleared"}


def decode_batch(payload: bytes) -> KvEventBatch:
    """Return what a payload says. Raises MalformedBatch, with what is wrong and where."""
    try:
        envelope = _decode_envelope(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedBatch(f"not a batch [ts, events, data_parallel_rank]: {error}") from error
    events = tuple(_decode_event(raw) for raw in envelope.events)
    return KvEventBatch(envelope.ts, events, envelope.data_parallel_rank)


def is_map(event: bytes | msgspec.Raw) -> bool:
    """Say whether an encoded event is a map, by the first byte of msgpack's map types."""
    first = memoryview(event)[0]
    return 0x80 <= first <= 0x8F or first in (0xDE, 0xDF)


def _decode_event(raw: msgspec.Raw) -> KvEvent:
    try:
        event: KvEvent = _decode_map(raw) if is_map(raw) else _decode_array(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        name = _name(raw)
        if name is not None and name not in _KNOWN:
            return UnknownEvent(name)
        raise MalformedBatch(f"{name or 'an event without a name'} cannot be read: {error}") from error
    return event


def _name(raw: msgspec.Raw) -> str | None:
    try:
        event = msgspec.msgpack.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    name = event.get("type") if isinstance(event, dict) else event[0] if isinstance(event, list) and event else None
    return name if isinstance(name, str) else None
