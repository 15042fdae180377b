"""What travels is loaded only when every byte of it is what it says."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.protocol.block_hash import PrefixScope, hash_blocks
from serve_app.cache.kv_chain import (
    BadChecksum,
    FormatMismatch,
    KvChain,
    KvFormat,
    KvPart,
    NotAChain,
    TransferError,
    Truncated,
    WrongChain,
    WrongScope,
    checksum,
    encode_header,
    make_header,
    verify_chain,
    verify_part,
)

SIZE = 4
FORMAT = KvFormat("model", SIZE, (KvPart("bfloat16", (2, 2, SIZE, 1, 3)),))
SCOPE = PrefixScope("model", lora="poet@1", salt=b"tenant a")
ROOT = SCOPE.root(b"secret")
IDS = np.arange(3 * SIZE, dtype=np.int32)


def make(scope: PrefixScope = SCOPE, root: bytes = ROOT, kv_format: KvFormat = FORMAT) -> KvChain:
    payload = np.random.default_rng(1).integers(0, 256, (3, kv_format.block_bytes), dtype=np.uint8)
    return KvChain(make_header(kv_format, scope, IDS, hash_blocks(root, IDS, SIZE), payload), payload)


def test_what_is_whole_arrives_unchanged() -> None:
    chain = make()
    assert FORMAT.block_bytes == 2 * 2 * SIZE * 3 * 2
    arrived = KvChain.from_bytes(chain.to_bytes())
    assert arrived.header == chain.header
    assert np.array_equal(arrived.payload, chain.payload)
    assert np.array_equal(verify_chain(arrived, FORMAT, SCOPE, ROOT), IDS)


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
        verify_chain(make(), other, SCOPE, ROOT)


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
        verify_chain(make(), FORMAT, scope, ROOT)


def test_what_does_not_belong_together_is_refused() -> None:
    """Hashes under another secret, tokens that are not the digest's, a payload that is not the checksum's."""
    chain = make()
    with pytest.raises(WrongChain, match="hashes"):
        verify_chain(chain, FORMAT, SCOPE, SCOPE.root(b"another secret"))
    other = (IDS + 1).astype("<i4").tobytes()
    forged = msgspec.structs.replace(chain.header, token_ids=other)
    with pytest.raises(WrongChain, match="prefix digest"):
        verify_chain(KvChain(forged, chain.payload), FORMAT, SCOPE, ROOT)
    # A collision: the hashes and a digest of other tokens, under the victim's hashes.
    stolen = make_header(FORMAT, SCOPE, IDS + 1, chain.header.hashes, chain.payload)
    with pytest.raises(WrongChain, match="hashes"):
        verify_chain(KvChain(stolen, chain.payload), FORMAT, SCOPE, ROOT)
    damaged = chain.payload.copy()
    damaged[1, 5] ^= 1
    with pytest.raises(BadChecksum):
        verify_chain(KvChain(chain.header, damaged), FORMAT, SCOPE, ROOT)
    with pytest.raises(Truncated):
        verify_chain(KvChain(chain.header, chain.payload[:2]), FORMAT, SCOPE, ROOT)
    empty = msgspec.structs.replace(
        chain.header, hashes=b"", token_ids=b"", checksum=checksum(np.empty((0, FORMAT.block_bytes), np.uint8))
    )
    with pytest.raises(WrongChain, match="empty"):
        verify_chain(KvChain(empty, chain.payload[:0]), FORMAT, SCOPE, ROOT)


def test_every_truncation_is_refused() -> None:
    data = make().to_bytes()
    for length in range(len(data)):
        with pytest.raises(Truncated):
            KvChain.from_bytes(data[:length])
    with pytest.raises(Truncated):
        KvChain.from_bytes(data + b"\0")


@given(st.data())
def test_every_changed_byte_is_refused(data: st.DataObject) -> None:
    raw = bytearray(make().to_bytes())
    # Bytes 6 and 7 are padding.
    at = data.draw(st.integers(0, len(raw) - 1).filter(lambda i: i not in (6, 7)))
    raw[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(TransferError):
        KvChain.from_bytes(bytes(raw))


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(TransferError):
        KvChain.from_bytes(noise)


def test_impossible_headers_are_refused() -> None:
    """Whole and with the right checksums, but with fields that cannot be."""
    chain = make()
    for change in (
        {"hashes": b"x" * 15},
        {"prefix_digest": b""},
        {"token_ids": b"1234"},
        {"format": KvFormat("model", 0, FORMAT.parts)},
        {"format": KvFormat("model", SIZE, (KvPart("complex", (1,)),))},
    ):
        header = msgspec.structs.replace(chain.header, **change)
        with pytest.raises(NotAChain):
            KvChain.from_bytes(encode_header(header) + chain.payload.tobytes())


def part_of(first: int, last: int, scope: PrefixScope = SCOPE, root: bytes = ROOT) -> KvChain:
    """Blocks ``first`` to ``last`` - 1 of the chain."""
    payload = make().payload[first:last].copy()
    hashes = hash_blocks(root, IDS, SIZE)[: 16 * last]
    return KvChain(make_header(FORMAT, scope, IDS[: SIZE * last], hashes, payload, first), payload)


@pytest.mark.parametrize(("first", "last"), [(0, 3), (0, 1), (1, 3), (2, 3)])
def test_a_part_is_what_was_asked_for_or_refused(first: int, last: int) -> None:
    """It fits one place of one chain: not another place, tokens, scope, root, nor bytes that changed."""
    hashes = hash_blocks(ROOT, IDS, SIZE)
    part = KvChain.from_bytes(part_of(first, last).to_bytes())
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
    with pytest.raises(BadChecksum):
        verify_part(lies, FORMAT, SCOPE, IDS, hashes, first)
    # Equal tokens after another beginning: only the digest tells.
    forked = msgspec.structs.replace(part.header, prefix_digest=bytes(len(part.header.prefix_digest)))
    with pytest.raises(WrongChain):
        verify_part(KvChain(forked, part.payload), FORMAT, SCOPE, IDS, hashes, first)
