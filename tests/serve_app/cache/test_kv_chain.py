"""What travels is loaded only when every byte of it is what it says."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.protocol.block_hash import PrefixScope, hash_at, hash_blocks
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
from serve_app.cache.tiers.disk_files import BlockFiles

SIZE = 4
FORMAT = KvFormat("model", SIZE, (KvPart("bfloat16", (2, 2, SIZE, 1, 3)),))
SCOPE = PrefixScope("model", lora="poet@1", salt=b"tenant a")
ROOT = SCOPE.root(b"secret")
IDS = np.arange(3 * SIZE, dtype=np.int32)


def make(scope: PrefixScope = SCOPE, root: bytes = ROOT, kv_format: KvFormat = FORMAT) -> KvChain:
    payload = np.random.default_rng(1).integers(0, 256, (3, kv_format.block_bytes), dtype=np.uint8)
    return KvChain(make_header(kv_format, scope, IDS, hash_blocks(root, IDS, SIZE), payload), payload)


def verify(chain: KvChain, kv_format: KvFormat = FORMAT, scope: PrefixScope = SCOPE, root: bytes = ROOT) -> None:
    """Ask for the whole chain, as somebody of this scope and root would."""
    verify_part(chain, kv_format, scope, IDS, hash_blocks(root, IDS, SIZE), 0)


def content_of(part: KvChain) -> bytes:
    return encode_header(part.header) + part.payload.tobytes()


def read(content: bytes) -> tuple[TierBlock, Row]:
    """Read the content of the file of a chain's last block."""
    return BlockFiles(Path("nowhere"), FORMAT).decode(content, hash_at(hash_blocks(ROOT, IDS, SIZE), 2))


def test_what_is_whole_arrives_unchanged() -> None:
    """A chain in another process, and one block in a file."""
    chain = make()
    assert FORMAT.block_bytes == 2 * 2 * SIZE * 3 * 2
    arrived = pickle.loads(pickle.dumps(chain))  # noqa: S301 as Ray does
    assert arrived.header == chain.header
    assert np.array_equal(arrived.payload, chain.payload)
    verify(arrived)
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
    ],
    ids=["model", "dtype", "shape", "axes", "draft", "block_size"],
)
def test_another_format_is_refused(other: KvFormat) -> None:
    with pytest.raises(FormatMismatch):
        verify(make(), other)


@pytest.mark.parametrize(
    "scope",
    [
        replace(SCOPE, salt=b"tenant b"),
        replace(SCOPE, lora="poet@2"),
        replace(SCOPE, lora=""),
        replace(SCOPE, model="x"),
    ],
)
def test_another_scope_is_refused(scope: PrefixScope) -> None:
    with pytest.raises(WrongScope):
        verify(make(), scope=scope)


def test_what_does_not_belong_together_is_refused() -> None:
    """Hashes under another secret, tokens that are not the digest's, a payload that is not the checksum's."""
    chain = make()
    with pytest.raises(WrongChain, match="hashes"):
        verify(chain, root=SCOPE.root(b"another secret"))
    other = (IDS + 1).astype("<i4").tobytes()
    forged = msgspec.structs.replace(chain.header, token_ids=other)
    with pytest.raises(WrongChain, match="tokens"):
        verify(KvChain(forged, chain.payload))
    # A collision: the hashes and a digest of other tokens, under the victim's hashes.
    stolen = make_header(FORMAT, SCOPE, IDS + 1, chain.header.hashes, chain.payload)
    with pytest.raises(WrongChain, match="tokens"):
        verify(KvChain(stolen, chain.payload))
    damaged = chain.payload.copy()
    damaged[1, 5] ^= 1
    with pytest.raises(Damaged):
        verify(KvChain(chain.header, damaged))
    with pytest.raises(Damaged):
        verify(KvChain(chain.header, chain.payload[:2]))
    empty = msgspec.structs.replace(
        chain.header, hashes=b"", token_ids=b"", checksum=checksum(np.empty((0, FORMAT.block_bytes), np.uint8))
    )
    with pytest.raises(WrongChain, match="hashes"):
        verify(KvChain(empty, chain.payload[:0]))


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


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(TransferError):
        read(noise)


def test_impossible_headers_are_refused() -> None:
    """Whole and with the right checksums, but with fields that cannot be."""
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


def part_of(first: int, last: int, scope: PrefixScope = SCOPE, root: bytes = ROOT) -> KvChain:
    """Blocks ``first`` to ``last`` - 1 of the chain."""
    payload = make().payload[first:last].copy()
    hashes = hash_blocks(root, IDS, SIZE)[: 16 * last]
    return KvChain(make_header(FORMAT, scope, IDS[: SIZE * last], hashes, payload, first), payload)


@pytest.mark.parametrize(("first", "last"), [(0, 3), (0, 1), (1, 3), (2, 3)])
def test_a_part_is_what_was_asked_for_or_refused(first: int, last: int) -> None:
    """It fits one place of one chain: not another place, tokens, scope, root, nor bytes that changed."""
    hashes = hash_blocks(ROOT, IDS, SIZE)
    part = part_of(first, last)
    verify_part(part, FORMAT, SCOPE, IDS, hashes, first)
    with pytest.raises(WrongChain):
        verify_part(part, FORMAT, SCOPE, IDS, hashes, first + 1)
    with pytest.raises(WrongChain):
        verify_part(part, FORMAT, SCOPE, IDS + 1, hashes, first)
    other = replace(SCOPE, salt=b"tenant b")
    with pytest.raises(WrongScope):
        verify_part(part_of(first, last, other), FORMAT, SCOPE, IDS, hashes, first)
    with pytest.raises(WrongChain):
        verify_part(part_of(first, last, SCOPE, other.root(b"secret")), FORMAT, SCOPE, IDS, hashes, first)
    lies = part_of(first, last)
    lies.payload[0, 0] ^= 1
    with pytest.raises(Damaged):
        verify_part(lies, FORMAT, SCOPE, IDS, hashes, first)
    # Equal tokens after another beginning: only the digest tells.
    forked = msgspec.structs.replace(part.header, prefix_digest=bytes(len(part.header.prefix_digest)))
    with pytest.raises(WrongChain):
        verify_part(KvChain(forked, part.payload), FORMAT, SCOPE, IDS, hashes, first)
