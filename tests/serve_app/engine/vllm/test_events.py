"""Both published forms of vLLM's KV events say the same; what cannot be read is an error that says so."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.engine.vllm.events.batches import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    MalformedBatch,
    UnknownEvent,
    decode_batch,
)
from tests.serve_app.engine.vllm.pool_model import encode

HASHES = st.binary(min_size=32, max_size=32) | st.integers(0, 2**64 - 1)
STORED = st.builds(
    BlockStored,
    st.lists(HASHES, max_size=3),
    st.none() | HASHES,
    st.lists(st.integers(0, 2**31 - 1), max_size=6),
    st.integers(1, 128),
    st.none() | st.integers(0, 9),
    st.sampled_from([None, "GPU", "CPU"]),
    st.none() | st.text(max_size=5),
    st.none() | st.lists(st.none() | st.tuples(st.text(max_size=5)), max_size=3),
    st.none() | st.integers(0, 3),
    st.sampled_from([None, "full_attention", "mamba"]),
    st.none() | st.integers(1, 9),
)
REMOVED = st.builds(
    BlockRemoved, st.lists(HASHES, max_size=3), st.none() | st.just("GPU"), st.none() | st.integers(0, 3)
)


def pack(events: list[Any], *rest: Any) -> bytes:
    return msgspec.msgpack.encode([2.5, events, *rest])


@given(st.lists(STORED | REMOVED | st.just(AllBlocksCleared()), max_size=4), st.booleans(), st.integers(0, 3))
def test_either_form_gives_back_what_was_sent(events: list[Any], maps: bool, rank: int) -> None:
    batch = decode_batch(encode(events, maps=maps, rank=rank))
    assert batch.data_parallel_rank == rank
    for sent, got in zip(events, batch.events, strict=True):
        assert isinstance(got, type(sent))
        assert [getattr(got, name) for name in sent.__struct_fields__] == [
            getattr(sent, name) for name in sent.__struct_fields__
        ]


def test_the_first_published_form_had_five_fields_and_no_rank() -> None:
    (event,) = decode_batch(pack([["BlockStored", [7], None, [1, 2], 2, None]])).events
    assert isinstance(event, BlockStored)
    assert (event.block_hashes, event.token_ids, event.medium, event.extra_keys) == ([7], [1, 2], None, None)


def test_fields_to_come_are_ignored_and_events_to_come_are_named() -> None:
    events = [
        {"type": "BlockRemoved", "block_hashes": [7], "locality": "LOCAL"},
        ["BlockRemoved", [7], "GPU", 0, "more"],
        {"type": "BlockMoved", "block_hashes": [7]},
        ["BlockMoved", [7]],
    ]
    removed, also, *unknown = decode_batch(pack(events, 0)).events
    assert isinstance(removed, BlockRemoved)
    assert isinstance(also, BlockRemoved)
    assert unknown == [UnknownEvent("BlockMoved")] * 2


@pytest.mark.parametrize(
    ("payload", "sentence"),
    [
        (b"", "not a batch"),
        (b"\xff\x00garbage", "not a batch"),
        (msgspec.msgpack.encode({"ts": 1.0, "events": []}), "not a batch"),
        (pack([5]), "an event without a name"),
        (pack([[]]), "an event without a name"),
        (pack([{"block_hashes": [7]}]), "an event without a name"),
        (pack([{"type": "BlockRemoved"}]), "BlockRemoved cannot be read: .*block_hashes"),
        (pack([["BlockStored", [7], None, ["x"], 2]]), r"BlockStored cannot be read: .*token_ids|\[3\]"),
        (pack([["BlockRemoved", [1.5]]]), "BlockRemoved cannot be read"),
    ],
)
def test_what_cannot_be_read_is_an_error_that_says_what(payload: bytes, sentence: str) -> None:
    with pytest.raises(MalformedBatch, match=sentence):
        decode_batch(payload)


@given(st.binary(max_size=64))
def test_no_bytes_raise_anything_else(payload: bytes) -> None:
    with suppress(MalformedBatch):
        decode_batch(payload)
