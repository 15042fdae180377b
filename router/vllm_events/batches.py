"""vLLM's KV events as they come over its socket: bytes in, typed events out. Imports no vllm: a batch is msgpack.

A batch is [ts, events, data_parallel_rank]; unknown fields are ignored. Source: vLLM's ``distributed/kv_events.py``.
"""

from typing import Annotated, Any

import msgspec

BlockHash = bytes | int
"""vLLM's name of a block: the 32 bytes of a SHA-256, or 64 bits of it where it was told to cut hashes."""

TokenId = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]

SEQUENCE_BYTES = 8
"""Of a batch's number, signed and big-endian, in a frame of its own; batches of one engine count from 0."""

END_OF_REPLAY = -1
"""The number after the last batch of a replay."""


class MalformedBatch(ValueError):
    """The bytes are no batch of KV events, or an event in it is not known or lacks what it must have."""


class BlockStored(msgspec.Struct, frozen=True, tag="BlockStored"):
    """Blocks that hang one under the other, the first under ``parent_block_hash`` (None: it begins a chain).

    ``token_ids``: those of all the blocks. ``extra_keys``: for each block what its hash covers besides tokens and
    parent: the adapter's name, the salt (a chain's first block only), what images and embeddings are; untagged.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[TokenId]
    block_size: int
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


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KvEventBatch(msgspec.Struct, frozen=True, array_like=True):
    """What one step of an engine did. ``ts``: seconds since 1970, by the engine's clock."""

    ts: float
    events: list[KvEvent]
    data_parallel_rank: int | None = None


_decode = msgspec.msgpack.Decoder(KvEventBatch).decode


def decode_batch(payload: bytes) -> KvEventBatch:
    """Return what a payload says. Raises MalformedBatch, with what is wrong and where."""
    try:
        return _decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedBatch(f"not a batch [ts, events, data_parallel_rank] of known events: {error}") from error
