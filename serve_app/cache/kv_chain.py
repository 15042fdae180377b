"""The format of a block chain's KV for transfer to another replica or to a file.

It defines the header, its byte layout, and all checks of received data. Layout: magic, version, header length, xxh3 of
the header, header (msgpack), payload. The payload stores block after block, so that a part of a chain is a slice and a
file holds one block. Numbers are raw bytes, because numpy has no bfloat16.
"""

import struct
from dataclasses import dataclass
from math import prod

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from router.protocol.block_hash import HASH_BYTES, PrefixScope, TokenArray
from serve_app.cache.prefix_digest import DIGEST_BYTES, extend_digests, scope_digest

MAGIC = b"WPKV"
VERSION = 1
MAX_HEADER_BYTES = 1 << 26

_PREFIX = struct.Struct("<4sHxxIQ")
PREFIX_BYTES = _PREFIX.size

Row = npt.NDArray[np.uint8]
"""One block's KV: ``KvFormat.block_bytes`` bytes."""


class TransferError(ValueError):
    """KV that must not be loaded."""


class Damaged(TransferError):
    """The bytes are not a block chain of this version, are incomplete, or were altered in transfer."""


class FormatMismatch(TransferError):
    """The KV has another model, dtype, layout or block size."""


class WrongScope(TransferError):
    """The KV belongs to another tenant, salt, adapter or model."""


class WrongChain(TransferError):
    """Hashes, tokens and digest do not match, or another secret made them."""


class KvPart(msgspec.Struct, frozen=True):
    """One tensor of a block, ``axes`` by ``shape``. A replica with several ranks has one part for each."""

    dtype: str
    shape: tuple[int, ...]
    axes: str = "layers,kv,block_size,kv_heads,head_dim"


class KvFormat(msgspec.Struct, frozen=True):
    """The format that must be equal to load KV: the model's fingerprint, the block size, and each part's layout."""

    model: str
    block_size: int
    parts: tuple[KvPart, ...]

    @property
    def part_bytes(self) -> list[int]:
        """Payload bytes of one block, by part."""
        return [_DTYPE_BYTES[part.dtype] * prod(part.shape) for part in self.parts]

    @property
    def block_bytes(self) -> int:
        """Payload bytes of one block."""
        return sum(self.part_bytes)


_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1, "simulated": 0}


class ChainHeader(msgspec.Struct, frozen=True, omit_defaults=True):
    """A payload's header. ``hashes``: packed; ``token_ids``: int32-LE; ``scope``, ``prefix_digest``: of the last block.

    ``prefix_digest`` is called "lineage" in the bytes of version 1. ``checksum``: xxh3_128 of the payload. A file holds
    one block from anywhere in a chain, an export a chain's start. ``owner``: of a file, as in ``TierBlock``. ``root``:
    the chain's root, for an engine that needs it to load. It is never in a file.
    """

    format: KvFormat
    scope: bytes
    lora: str
    hashes: bytes
    token_ids: bytes
    prefix_digest: bytes = msgspec.field(name="lineage")
    checksum: bytes
    owner: str = ""
    root: bytes = b""

    @property
    def blocks(self) -> int:
        """The number of blocks in the payload."""
        return len(self.hashes) // HASH_BYTES

    @property
    def payload_bytes(self) -> int:
        """The number of bytes after the header."""
        return self.blocks * self.format.block_bytes


@dataclass(frozen=True, slots=True)
class KvChain:
    """A header and its payload [blocks, block_bytes], in numpy so that Ray's object store passes it without a copy."""

    header: ChainHeader
    payload: Row


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ChainHeader)


def checksum(payload: Row) -> bytes:
    """Return the xxh3_128 of a C-contiguous payload."""
    return xxhash.xxh3_128_digest(payload.data if payload.size else b"")


def encode_header(header: ChainHeader) -> bytes:
    """Return the bytes that precede a payload."""
    body = _encoder.encode(header)
    return _PREFIX.pack(MAGIC, VERSION, len(body), xxhash.xxh3_64_intdigest(body)) + body


def header_bytes(prefix: bytes | memoryview) -> int:
    """Return the payload's offset, from the first ``PREFIX_BYTES``. Raises Damaged."""
    if len(prefix) < PREFIX_BYTES:
        raise Damaged(f"{len(prefix)} bytes hold no header")
    magic, version, length, _ = _PREFIX.unpack_from(prefix)
    if magic != MAGIC:
        raise Damaged("the magic number is another one")
    if version != VERSION:
        raise Damaged(f"version {version}, and this is {VERSION}")
    if length > MAX_HEADER_BYTES:
        raise Damaged(f"a header of {length} bytes")
    return PREFIX_BYTES + int(length)


def decode_header(data: bytes | memoryview) -> tuple[ChainHeader, int]:
    """Return the header and the payload's offset. Raises Damaged."""
    start = header_bytes(data)
    if len(data) < start:
        raise Damaged(f"a header of {start} bytes in {len(data)}")
    body = bytes(data[PREFIX_BYTES:start])
    if xxhash.xxh3_64_intdigest(body) != _PREFIX.unpack_from(data)[3]:
        raise Damaged("the header's checksum is wrong")
    try:
        header = _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise Damaged(f"the header cannot be read: {error}") from error
    sizes = (len(header.hashes) % HASH_BYTES, len(header.prefix_digest) - DIGEST_BYTES, header.format.block_size < 1)
    if any(sizes) or any(part.dtype not in _DTYPE_BYTES for part in header.format.parts):
        raise Damaged("the header's fields have impossible sizes")
    if len(header.token_ids) != header.blocks * header.format.block_size * 4:
        raise Damaged("the header's tokens do not fill its blocks")
    return header, start


def check_payload(header: ChainHeader, payload: Row) -> None:
    """Raise Damaged if the payload does not match the header."""
    if payload.dtype != np.uint8 or payload.shape != (header.blocks, header.format.block_bytes):
        raise Damaged(f"a payload of shape {payload.shape} for {header.blocks} blocks")
    if checksum(np.ascontiguousarray(payload)) != header.checksum:
        raise Damaged("the payload's checksum is wrong")


def check_format(header: ChainHeader, expected: KvFormat) -> None:
    """Raise FormatMismatch with the field's name if the header's format differs."""
    for field in KvFormat.__struct_fields__:
        theirs, ours = getattr(header.format, field), getattr(expected, field)
        if theirs != ours:
            raise FormatMismatch(f"{field} is {theirs}, not {ours}")


def check_scope(header: ChainHeader, scope: PrefixScope, first: int = 0) -> None:
    """Raise WrongScope if the KV, of the blocks from ``first`` on, was computed under another scope."""
    if header.lora != scope.lora:
        raise WrongScope(f"the KV was computed with adapter {header.lora!r}, not {scope.lora!r}")
    if header.scope != scope_digest(scope.at(first + max(header.blocks - 1, 0))):
        raise WrongScope("the KV belongs to another scope")


def make_header(
    kv_format: KvFormat, scope: PrefixScope, token_ids: TokenArray, hashes: bytes, payload: Row, first: int = 0
) -> ChainHeader:
    """Return the header of a chain's blocks from ``first`` on. ``token_ids`` and ``hashes`` cover the whole chain."""
    digests = extend_digests(b"", scope, token_ids, kv_format.block_size)
    return ChainHeader(
        format=kv_format,
        scope=scope_digest(scope.at(len(digests) - 1)),
        lora=scope.lora,
        hashes=hashes[first * HASH_BYTES :],
        token_ids=token_ids[first * kv_format.block_size :].astype("<i4", copy=False).tobytes(),
        prefix_digest=digests[-1],
        checksum=checksum(payload),
    )


def verify_part(
    part: KvChain, kv_format: KvFormat, scope: PrefixScope, token_ids: TokenArray, hashes: bytes, first: int
) -> None:
    """Raise a TransferError unless ``part`` holds blocks of the wanted chain, in order from block ``first`` on."""
    header, size = part.header, kv_format.block_size
    check_format(header, kv_format)
    check_scope(header, scope, first)
    check_payload(header, part.payload)
    end = first + header.blocks
    if not header.blocks or header.hashes != hashes[first * HASH_BYTES : end * HASH_BYTES]:
        raise WrongChain("the hashes are not those that were asked for")
    if header.token_ids != token_ids[first * size : end * size].astype("<i4", copy=False).tobytes():
        raise WrongChain("the tokens are not those that were asked for")
    if extend_digests(b"", scope, token_ids[: end * size], size)[-1] != header.prefix_digest:
        raise WrongChain("the prefix digest is not that of the tokens")
