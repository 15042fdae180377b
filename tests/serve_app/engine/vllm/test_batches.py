"""vLLM's events, one batch at a time: what is read, what is taken, and what is refused with a sentence."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.protocol.events import BlocksStored, CacheCleared, Event
from serve_app.engine.vllm.events.batches import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEventBatch,
    MalformedBatch,
    decode_batch,
)
from serve_app.engine.vllm.events.pool import UnsupportedEvents, VllmPool
from tests.serve_app.engine.vllm.pool_model import OTHER, ROOT, STORED, chain, stored


def pack(events: list[Any], *rest: Any) -> bytes:
    return msgspec.msgpack.encode([2.5, events, *rest])


def test_fields_to_come_are_ignored_and_absent_ones_are_none() -> None:
    """A newer vLLM says more, and an adapter or a rank is not always there."""
    event = {"type": "BlockStored", "block_hashes": [7], "parent_block_hash": None, "token_ids": [1, 2]}
    removed = {"type": "BlockRemoved", "block_hashes": [b"7"], "locality": "LOCAL"}
    batch = decode_batch(pack([{**event, "block_size": 2}, removed, {"type": "AllBlocksCleared"}]))
    assert batch == KvEventBatch(2.5, [BlockStored([7], None, [1, 2], 2), BlockRemoved([b"7"]), AllBlocksCleared()])


@pytest.mark.parametrize(
    ("payload", "sentence"),
    [
        (b"", "not a batch"),
        (b"\xff\x00garbage", "not a batch"),
        (msgspec.msgpack.encode({"ts": 1.0, "events": []}), "not a batch"),
        (pack([{"block_hashes": [7]}]), "missing required field `type`"),
        (pack([{"type": "BlockMoved", "block_hashes": [7]}]), "BlockMoved"),
        (pack([{"type": "BlockRemoved"}]), "missing required field `block_hashes`"),
        (pack([{"type": "BlockRemoved", "block_hashes": [1.5]}]), "block_hashes"),
        (pack([STORED, stored(token_ids=[1, 2**31])]), r"token_ids"),
    ],
)
def test_what_cannot_be_read_is_an_error_that_says_what(payload: bytes, sentence: str) -> None:
    with pytest.raises(MalformedBatch, match=sentence):
        decode_batch(payload)


@given(st.binary(max_size=64))
def test_no_bytes_raise_anything_else(payload: bytes) -> None:
    with suppress(MalformedBatch):
        decode_batch(payload)


def told(pool: VllmPool, *events: Any, rank: int | None = 0) -> list[Event]:
    return pool.translate(KvEventBatch(1.0, list(events), rank))


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_name": "x@1", "extra_keys": [("x@1", ROOT.hex())]},
        {"lora_name": OTHER.hex(), "extra_keys": [(OTHER.hex(), ROOT.hex())]},
        {"kv_cache_spec_kind": "mla_attention"},
    ],
    ids=["an adapter", "an adapter whose name is a root", "mla"],
)
def test_a_chain_is_put_under_its_root(changes: dict[str, Any]) -> None:
    assert told(VllmPool(2, 8), stored(**changes), rank=None) == [BlocksStored(chain(1, 2))]


@pytest.mark.parametrize(
    "changes",
    [
        *({"extra_keys": keys} for keys in (None, [None], [()], [("short",)], [("g" * 32,)], [(7,)])),
        {"extra_keys": [(ROOT.hex().upper().replace("7", "A"),)]},
        {"extra_keys": [(ROOT.hex(), "image")]},
        {"lora_name": OTHER.hex(), "extra_keys": [(OTHER.hex(),)]},
        {"parent_block_hash": b"?", "extra_keys": None},
        {"parent_block_hash": b"0", "extra_keys": [(("image", 0),)]},
    ],
)
def test_what_has_no_root_of_ours_or_is_not_tokens_alone_is_nobodys(changes: dict[str, Any]) -> None:
    """Tokens do not say what an image is; a block whose parent is unknown has no hash of ours. Its end is no news."""
    pool = VllmPool(2, 8)
    parent = stored(block_hashes=[b"0"], token_ids=[0, 0])
    assert told(pool, parent, stored(**changes), BlockRemoved([b"1"])) == [BlocksStored(chain(0, 0))]


def test_more_blocks_than_the_pool_has_mean_that_removals_were_lost() -> None:
    """Memory is bounded by the pool."""
    pool = VllmPool(2, 2)
    told(pool, STORED, stored(block_hashes=[b"2"], token_ids=[3, 4]))
    events = told(pool, stored(block_hashes=[b"3"], token_ids=[5, 6]))
    assert events == [CacheCleared(), BlocksStored(chain(5, 6))]
    assert len(pool) == 1


@pytest.mark.parametrize(
    ("event", "sentence"),
    [
        (stored(group_idx=1), "group 1 of the model's KV"),
        (BlockRemoved([b"1"], "GPU", 1), "group 1 of the model's KV"),
        (stored(medium="CPU"), "'CPU'.*offload"),
        (BlockRemoved([b"1"], "CPU"), "'CPU'.*offload"),
        (stored(kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=512), "sliding_window.*512"),
        (stored(kv_cache_spec_kind="mamba"), "'mamba'"),
        (stored(block_size=128, token_ids=[0] * 128), "set block_size to 128"),
        (stored(block_hashes=[b"1", b"2"]), "blocks were left out"),
    ],
)
def test_another_kind_of_cache_is_refused_with_a_sentence(event: Any, sentence: str) -> None:
    with pytest.raises(UnsupportedEvents, match=sentence):
        told(VllmPool(2, 8), event)
    with pytest.raises(UnsupportedEvents, match="data parallel rank 1"):
        told(VllmPool(2, 8), event, rank=1)


def test_an_event_that_contradicts_itself_is_malformed() -> None:
    with pytest.raises(MalformedBatch):
        told(VllmPool(2, 8), stored(extra_keys=[None, None]))
