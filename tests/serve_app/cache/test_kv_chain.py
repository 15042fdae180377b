"""Transferred KV is loaded only if every byte of it matches its description; the order of evictions."""

import pickle
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.protocol.block_hash import PrefixScope, hash_at, hash_blocks
from serve_app.cache.eviction import EvictionQueue, Standing
from serve_app.cache.kv_chain import (
    Damaged,
    FormatMismatch,
    KvChain,
    KvFormat,
    KvPart,
    Row,
    TransferError,
    WrongChain,
    WrongScope,
    checksum,
    encode_header,
    make_header,
    verify_part,
)
from serve_app.cache.prefix_digest import TierBlock
from serve_app.cache.tiers.disk import BlockFiles

SIZE = 4
FORMAT = KvFormat("model", SIZE, (KvPart("bfloat16", (2, 2, SIZE, 1, 3)),))
SCOPE = PrefixScope("model", lora="poet@1", salt=b"tenant a")
ROOT = SCOPE.root(b"secret")
IDS = np.arange(3 * SIZE, dtype=np.int32)
HASHES = hash_blocks(ROOT, IDS, SIZE)


def part_of(first: int = 0, last: int = 3, scope: PrefixScope = SCOPE, root: bytes = ROOT) -> KvChain:
    payload = np.random.default_rng(1).integers(0, 256, (3, FORMAT.block_bytes), dtype=np.uint8)[first:last]
    hashes = hash_blocks(root, IDS, SIZE)[: 16 * last]
    return KvChain(make_header(FORMAT, scope, IDS[: SIZE * last], hashes, payload, first), payload)


def content_of(part: KvChain) -> bytes:
    return encode_header(part.header) + part.payload.tobytes()


def read(content: bytes) -> tuple[TierBlock, Row]:
    """Read the content of the file of a chain's last block."""
    return BlockFiles(Path("nowhere"), FORMAT).decode(content, hash_at(hash_blocks(ROOT, IDS, SIZE), 2))


def test_an_intact_part_arrives_unchanged() -> None:
    """A chain is sent to another process, and one block to a file."""
    chain = part_of()
    assert FORMAT.block_bytes == 2 * 2 * SIZE * 3 * 2
    arrived = pickle.loads(pickle.dumps(chain))  # noqa: S301 as Ray does
    assert arrived.header == chain.header
    assert np.array_equal(arrived.payload, chain.payload)
    verify_part(arrived, FORMAT, SCOPE, IDS, HASHES, 0)
    last = part_of(2, 3)
    block, row = read(content_of(last))
    assert np.array_equal(row, chain.payload[2])
    assert block.prefix_digest == last.header.prefix_digest == chain.header.prefix_digest
    assert b"lineage" in content_of(last), "files of earlier builds stay readable"


@pytest.mark.parametrize(
    "other",
    [
        KvFormat("another", SIZE, FORMAT.parts),
        KvFormat("model", SIZE, (KvPart("float16", FORMAT.parts[0].shape),)),
        KvFormat("model", SIZE, (KvPart("bfloat16", (2, 2, SIZE, 3, 1)),)),
        KvFormat("model", SIZE, (KvPart("bfloat16", FORMAT.parts[0].shape, axes="kv,layers,block_size"),)),
        KvFormat("model", SIZE, (*FORMAT.parts, *FORMAT.parts)),
        KvFormat("model", 2 * SIZE, FORMAT.parts),
        replace(SCOPE, salt=b"tenant b"),
        replace(SCOPE, lora="poet@2"),
        replace(SCOPE, lora=""),
        replace(SCOPE, model="x"),
    ],
    ids=["model", "dtype", "shape", "axes", "ranks", "block_size", "salt", "adapter", "no adapter", "scope's model"],
)
def test_another_format_or_scope_is_refused(other: KvFormat | PrefixScope) -> None:
    kv_format, scope = (other, SCOPE) if isinstance(other, KvFormat) else (FORMAT, other)
    with pytest.raises(WrongScope if scope is other else FormatMismatch):
        verify_part(part_of(), kv_format, scope, IDS, HASHES, 0)


def test_every_truncation_is_refused() -> None:
    data = content_of(part_of(2, 3))
    for length in range(len(data)):
        with pytest.raises(Damaged):
            read(data[:length])
    with pytest.raises(Damaged):
        read(data + b"\0")


@given(st.data())
def test_every_changed_byte_is_refused(data: st.DataObject) -> None:
    raw = bytearray(content_of(part_of(2, 3)))
    # Bytes 6 and 7 are padding.
    at = data.draw(st.integers(0, len(raw) - 1).filter(lambda i: i not in (6, 7)))
    raw[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(TransferError):
        read(bytes(raw))


def test_impossible_headers_are_refused() -> None:
    """The parts are whole and have the right checksums, but impossible fields."""
    part = part_of(2, 3)
    for change in (
        {"hashes": b"x" * 15},
        {"prefix_digest": b""},
        {"token_ids": b"1234"},
        {"format": KvFormat("model", 0, FORMAT.parts)},
        {"format": KvFormat("model", SIZE, (KvPart("complex", (1,)),))},
    ):
        header = msgspec.structs.replace(part.header, **change)
        with pytest.raises(Damaged):
            read(content_of(KvChain(header, part.payload)))


@pytest.mark.parametrize(("first", "last"), [(0, 3), (0, 1), (1, 3), (2, 3)])
def test_a_part_is_the_requested_one_or_refused(first: int, last: int) -> None:
    """It fits one place of one chain: another place, tokens, scope, root or changed bytes are refused."""
    part = part_of(first, last)
    header, payload = part.header, part.payload
    verify_part(part, FORMAT, SCOPE, IDS, HASHES, first)
    tenant_b, damaged = replace(SCOPE, salt=b"tenant b"), payload.copy()
    damaged[0, 0] ^= 1
    # A collision: the requested hashes, and a digest, of other tokens.
    stolen = make_header(FORMAT, SCOPE, IDS[: SIZE * last] + 1, HASHES[: 16 * last], payload, first)
    # Equal tokens after another prefix: only the digest differs.
    forked = msgspec.structs.replace(header, prefix_digest=bytes(len(header.prefix_digest)))
    none = checksum(payload[:0])
    empty = msgspec.structs.replace(header, hashes=b"", token_ids=b"", checksum=none)
    for error, asked_first, ids, answer in (
        (WrongChain, first + 1, IDS, part),
        (WrongChain, first, IDS + 1, part),
        (WrongScope, first, IDS, part_of(first, last, tenant_b)),
        (WrongChain, first, IDS, part_of(first, last, SCOPE, tenant_b.root(b"secret"))),
        (Damaged, first, IDS, KvChain(header, damaged)),
        (Damaged, first, IDS, KvChain(header, payload[:-1])),
        (WrongChain, first, IDS, KvChain(stolen, payload)),
        (WrongChain, first, IDS, KvChain(forked, payload)),
        (TransferError, first, IDS, KvChain(empty, payload[:0])),
    ):
        with pytest.raises(error):
            verify_part(answer, FORMAT, SCOPE, ids, HASHES, asked_first)


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 9), st.one_of(st.none(), st.tuples(st.integers(0, 9), st.sampled_from(Standing))))
    )
)
def test_a_queue_gives_the_lowest_first(steps: list[tuple[int, tuple[int, Standing] | None]]) -> None:
    """It equals a plain search through any insertions, moves and removals; equal entries leave in order of arrival."""
    queue: EvictionQueue[int] = EvictionQueue()
    naive: dict[int, tuple[Standing, int, int]] = {}
    for number, (key, place) in enumerate(steps):
        if place is None:
            queue.discard(key)
            naive.pop(key, None)
        else:
            queue.put(key, *place)
            naive[key] = place[1], place[0], number
        assert len(queue) == len(naive)
        if naive:
            assert queue.first() == min(naive, key=naive.__getitem__)
