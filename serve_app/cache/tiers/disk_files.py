"""The disk tier's directory: one file for each KV block, in a slot held by one engine.

It owns names, modes, the atomic write and the slot's lock. A file is written whole or not at all, and checked before
use. A saved block's name ends in ``.saved``, or ``.TIME.saved`` if the save expires (Unix time), so a rename marks it.
Paths of blocks are plain strings, because pathlib would take a third or more of the time for a small file, and it
interns every name.
"""

import contextlib
import fcntl
import math
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from router.protocol.block_hash import HASH_BYTES
from serve_app.cache.kv_chain import (
    PREFIX_BYTES,
    ChainHeader,
    Damaged,
    KvFormat,
    Row,
    WrongChain,
    check_format,
    check_payload,
    checksum,
    decode_header,
    encode_header,
    header_bytes,
)
from serve_app.cache.prefix_digest import TierBlock

_NAME = re.compile(r"([0-9a-f]{32})\.(?:kv|(?P<saved>(?:(?P<until_s>[0-9]{1,12})\.)?saved))")
_TEMPORARY = re.compile(r"[0-9a-f]{32}\.tmp")

MAX_SLOTS = 1024


class DiskTierError(OSError):
    """The directory cannot hold a disk tier. The message contains the remedy."""


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file with a block's name. ``saved_until_s``: as in ``Entry``; ``used_ns``: the time of its last use."""

    block_hash: bytes
    saved_until_s: float | None
    size: int
    used_ns: int


class BlockFiles:
    """The files of one private directory."""

    def __init__(self, directory: Path, kv_format: KvFormat) -> None:
        self.directory = directory
        self._prefix = f"{directory}/"
        self.format = kv_format

    def encode(self, block: TierBlock, row: Row) -> bytes:
        """Return the whole content of a block's file."""
        header = ChainHeader(
            format=self.format,
            scope=block.scope,
            lora=block.lora,
            hashes=block.block_hash,
            token_ids=block.token_bytes,
            prefix_digest=block.prefix_digest,
            checksum=checksum(row),
            owner=block.owner,
        )
        return encode_header(header) + row.tobytes()

    def write(self, block_hash: bytes, content: bytes, saved_until_s: float | None, used_ns: int) -> None:
        """Create a block's file atomically, with its time of use. Raises OSError and leaves no partial file."""
        temporary = f"{self._prefix}{block_hash.hex()}.tmp"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                view = memoryview(content)
                while view:
                    view = view[file.write(view) or 0 :]
            os.utime(temporary, ns=(used_ns, used_ns))
            os.replace(temporary, self._path(block_hash, saved_until_s))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def read(self, block_hash: bytes, saved_until_s: float | None) -> tuple[TierBlock, Row]:
        """Return a block and its bytes. Raises OSError or a TransferError if the file is unusable."""
        with open(self._path(block_hash, saved_until_s), "rb") as file:
            return self.decode(file.read(), block_hash)

    def decode(self, data: bytes, block_hash: bytes) -> tuple[TierBlock, Row]:
        """Return a block from its file's content, the inverse of ``encode``. Raises a TransferError."""
        header, start = decode_header(data)
        block = self._check_block(header, block_hash)
        payload = np.frombuffer(data, dtype=np.uint8)[start:]
        if payload.size != self.format.block_bytes:
            raise Damaged(f"{payload.size} payload bytes, not {self.format.block_bytes}")
        check_payload(header, payload.reshape(1, -1))
        return block, payload

    def read_header(self, found: FoundFile) -> TierBlock:
        """Return the block in a file's header, without reading the payload. Raises OSError or a TransferError."""
        with open(self._path(found.block_hash, found.saved_until_s), "rb") as file:
            prefix = file.read(PREFIX_BYTES)
            data = prefix + file.read(header_bytes(prefix) - PREFIX_BYTES)
        header, start = decode_header(data)
        if start + header.payload_bytes != found.size:
            raise Damaged(f"{found.size} bytes where the header names {start + header.payload_bytes}")
        return self._check_block(header, found.block_hash)

    def mark(self, block_hash: bytes, before_s: float | None, saved_until_s: float | None) -> None:
        """Rename a block's file to change the expiry of its save in the name. Raises OSError."""
        os.replace(self._path(block_hash, before_s), self._path(block_hash, saved_until_s))

    def touch(self, block_hash: bytes, saved_until_s: float | None, used_ns: int) -> None:
        """Record a use. Raises OSError."""
        os.utime(self._path(block_hash, saved_until_s), ns=(used_ns, used_ns))

    def remove(self, block_hash: bytes, saved_until_s: float | None) -> None:
        """Unlink a block's file, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(block_hash, saved_until_s))

    def scan(self) -> Iterator[FoundFile]:
        """Yield every file with a block's name. Remains of torn writes are unlinked; other files stay untouched."""
        with os.scandir(self.directory) as entries:
            for entry in entries:
                name = _NAME.fullmatch(entry.name)
                if name is not None and entry.is_file(follow_symlinks=False):
                    stat = entry.stat(follow_symlinks=False)
                    until_s = float(name["until_s"] or math.inf) if name["saved"] else None
                    yield FoundFile(bytes.fromhex(name[1]), until_s, stat.st_size, stat.st_mtime_ns)
                elif _TEMPORARY.fullmatch(entry.name):
                    with contextlib.suppress(OSError):
                        os.unlink(entry.path)

    def _path(self, block_hash: bytes, saved_until_s: float | None) -> str:
        if saved_until_s is None:
            return f"{self._prefix}{block_hash.hex()}.kv"
        if saved_until_s == math.inf:
            return f"{self._prefix}{block_hash.hex()}.saved"
        return f"{self._prefix}{block_hash.hex()}.{int(saved_until_s)}.saved"

    def _check_block(self, header: ChainHeader, block_hash: bytes) -> TierBlock:
        check_format(header, self.format)
        if header.hashes != block_hash or len(header.hashes) != HASH_BYTES:
            raise WrongChain("the file holds a block other than the one in its name")
        return TierBlock(block_hash, header.prefix_digest, header.scope, header.lora, header.token_ids, header.owner)


class DiskSlot:
    """An exclusively held directory ``slot-N``. The lock ends with ``release`` or with the process."""

    def __init__(self, directory: Path) -> None:
        """Take a slot. Raises DiskTierError if other users could read it, or if no slot is free."""
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise DiskTierError(f"cannot make disk_cache_dir {directory}: {error.strerror}") from error
        for number in range(MAX_SLOTS):
            path = directory / f"slot-{number}"
            _make_private(path)
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(descriptor)
                continue
            self.path = path
            self._descriptor: int | None = descriptor
            return
        raise DiskTierError(f"all {MAX_SLOTS} slots of {directory} are taken")

    def release(self) -> None:
        """Release the slot for another engine. A repeated call has no effect."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _make_private(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
        ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
        if ours:
            path.chmod(0o700)
    except OSError as error:
        raise DiskTierError(f"cannot use {path} for the disk tier: {error.strerror}") from error
    if not ours:
        raise DiskTierError(f"{path} is not a directory of this user; choose another disk_cache_dir")
