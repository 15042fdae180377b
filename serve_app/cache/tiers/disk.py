"""The disk tier: one file for each KV block, in a slot of its directory held by one engine.

It owns names, modes, the atomic write and the slot's lock. A file is written whole or not at all, and checked before
use. A saved block's name ends in ``.saved``, or ``.TIME.saved`` if the save expires (Unix time), so a rename marks it.
Paths of blocks are plain strings, because pathlib would take a third or more of the time for a small file, and it
interns every name.

``DiskTier`` has tenants' shares of the space and the expiry of saves. Only the queue's thread stores, loads and marks.
Any thread may look up.
"""

import contextlib
import fcntl
import logging
import math
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from router.protocol.block_hash import HASH_BYTES
from serve_app.cache.kv_chain import (
    PREFIX_BYTES,
    ChainHeader,
    Damaged,
    KvFormat,
    Row,
    TransferError,
    WrongChain,
    check_format,
    check_payload,
    checksum,
    decode_header,
    encode_header,
    header_bytes,
)
from serve_app.cache.prefix_digest import TierBlock
from serve_app.cache.tiers.tier import Tier, TierParts, Wanted
from serve_app.cache.tiers.tier_index import UNKNOWN, Entry, TierCounts, TierIndex
from serve_app.cache.tiers.tier_queue import TierQueue

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

    def read_header(self, entry: FoundFile) -> TierBlock:
        """Return the block in a file's header, without reading the payload. Raises OSError or a TransferError."""
        with open(self._path(entry.block_hash, entry.saved_until_s), "rb") as file:
            prefix = file.read(PREFIX_BYTES)
            data = prefix + file.read(header_bytes(prefix) - PREFIX_BYTES)
        header, start = decode_header(data)
        if start + header.payload_bytes != entry.size:
            raise Damaged(f"{entry.size} bytes where the header names {start + header.payload_bytes}")
        return self._check_block(header, entry.block_hash)

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


_log = logging.getLogger(__name__)

SCAN_LIMIT_S = 10.0
"""The time limit for reading headers at the start. Files not reached by then, the least recently used, are dropped."""

DISK_ACTIVE_S = 86400.0
"""After this many seconds without a request, a tenant has no share here. A disk cache should last for a day."""


def open_disk(parts: TierParts, below: Tier | None) -> Tier | None:
    """Return the tier in a slot of its own, or None if it is off. Raises DiskTierError or ValueError."""
    settings = parts.settings
    if not settings.disk_cache_bytes:
        return None
    parts.check_bound("disk_cache_bytes", settings.disk_cache_bytes)
    if settings.disk_cache_dir is None:
        raise ValueError("disk_cache_bytes needs disk_cache_dir")
    slot = DiskSlot(settings.disk_cache_dir)
    tier = DiskTier(
        BlockFiles(slot.path, parts.format),
        settings.disk_cache_bytes,
        shares=parts.shares,
        save_ttl_s=settings.save_ttl_s,
        clock=parts.clock,
        below=below,
        on_close=slot.release,
    )
    return TierQueue(tier, settings.disk_queue_bytes, parts)


class DiskTier:
    """At most ``capacity_bytes`` of files, a ``BlockStore``. ``below``: the tier that gets evicted blocks.

    ``save_ttl_s``: the maximum remaining time of a previous run's saves.
    """

    name = "disk"
    expected_bytes_per_s = 5e8

    def __init__(
        self,
        files: BlockFiles,
        capacity_bytes: int,
        *,
        shares: Mapping[str, float] | None = None,
        save_ttl_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        scan_limit_s: float = SCAN_LIMIT_S,
        below: Tier | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """Index the files that a previous run left in the directory."""
        self.capacity_bytes = capacity_bytes
        self.refused_files = 0
        self.index: TierIndex[Any] = TierIndex(self.name, shares or {}, clock, DISK_ACTIVE_S)
        self.close = on_close
        self.life = 0
        """The number of resets."""
        self._files = files
        self._below = below
        self._wall_clock = wall_clock
        self._inherited: dict[bytes, float] = {}
        """Expiring saves of a previous run, by Unix time, the soonest first. No caller will end them."""
        self._used_ns = 0
        self._scan(clock, scan_limit_s, save_ttl_s)

    @property
    def counts(self) -> TierCounts:
        """Counters since the start."""
        return self.index.counts

    def learn(self, scope: bytes, root: bytes) -> None:
        """Do nothing: the files are this user's alone, and not encrypted."""

    def known(self, block: TierBlock | Wanted) -> bool | None:
        """Return whether a block is stored (any thread); False: another one has its hash."""
        stored = self.index.find(block.block_hash)
        return None if stored is None else stored.prefix_digest == block.prefix_digest

    def holds(self, block: Wanted | TierBlock) -> bool:
        """Return whether a block is stored (any thread)."""
        return self.known(block) is True

    def store(self, block: TierBlock, row: Row, saved_until_s: float | None = None, *, life: int | None = None) -> bool:
        """Write a block, after evictions if needed, and return whether it is stored. ``life``: when it was offered."""
        life = self.life if life is None else life
        block_hash = block.block_hash
        stored = self.known(block)
        if stored is not None:
            if not stored:
                return False
            self.touch([block_hash])
            return saved_until_s is None or self.mark([block_hash], saved_until_s) == 1
        content = self._files.encode(block, row)
        if life != self.life or not self._make_room(len(content), block.owner, saved=saved_until_s is not None):
            return False
        try:
            self._files.write(block_hash, content, saved_until_s, self._now_ns())
        except OSError as error:
            self.counts.failures += 1
            _log.warning("a KV block could not be written to disk: %s", error.strerror)
            return False
        with self.index.lock:
            if life == self.life:
                self.index.add(Entry(block, len(content), saved_until_s))
                return True
        self._files.remove(block_hash, saved_until_s)
        return False

    def load(self, block_hash: bytes) -> tuple[TierBlock, Row] | None:
        """Read a block. If its file is missing, torn or foreign, forget the block with a warning."""
        filed = self.index.get(block_hash)
        if filed is None:
            return None
        try:
            block, row = self._files.read(block_hash, filed.saved_until_s)
            if block.prefix_digest != filed.block.prefix_digest:
                raise WrongChain("the file was exchanged")
            return block, row
        except (OSError, TransferError) as error:
            with self.index.lock:
                forgotten = self._forget(block_hash)
            if forgotten:
                self.refused_files += 1
                _log.warning("a KV block's file was dropped: %s", error)
                self._files.remove(block_hash, filed.saved_until_s)
            return None

    def read(self, blocks: Sequence[Wanted]) -> Iterator[tuple[TierBlock, Row]]:
        """Yield the blocks that can be read, up to the first that cannot."""
        for one in blocks:
            block = self.load(one.block_hash)
            if block is None:
                return
            yield block

    def touch(self, block_hashes: Iterable[bytes]) -> None:
        """Mark blocks as the most recently used, in the given order: children before their parents."""
        for block_hash in block_hashes:
            with self.index.lock:
                filed = self.index.get(block_hash)
                if filed is None:
                    continue
                self.index.use(block_hash)
            try:
                self._files.touch(block_hash, filed.saved_until_s, self._now_ns())
            except OSError as error:
                _log.warning("a KV block's time of use was not noted: %s", error.strerror)

    def mark(self, block_hashes: Iterable[bytes], saved_until_s: float | None) -> int:
        """Set the expiry (Unix time) of blocks' saves, also on disk; None: not saved. Return how many were marked."""
        marked = 0
        for block_hash in block_hashes:
            filed = self.index.get(block_hash)
            if filed is None:
                continue
            if filed.saved_until_s != saved_until_s:
                try:
                    self._files.mark(block_hash, filed.saved_until_s, saved_until_s)
                except OSError as error:
                    _log.warning("a KV block could not be marked: %s", error.strerror)
                    continue
            with self.index.lock:
                self._inherited.pop(block_hash, None)
                if block_hash in self.index:
                    self.index.mark(block_hash, saved_until_s)
                    marked += 1
                else:  # it was forgotten concurrently, and the unlinking caller needs its new name
                    filed.saved_until_s = saved_until_s
        return marked

    def forget_all(self) -> Callable[[], None]:
        """Forget every block at once (any thread). Return a function that unlinks the files, for the queue's thread."""
        with self.index.lock:
            self.life += 1
            forgotten = list(self.index)
            self.index.clear()
            self._inherited.clear()

        def unlink() -> None:
            for filed in forgotten:
                self._files.remove(filed.block.block_hash, filed.saved_until_s)

        return unlink

    def _make_room(self, size: int, owner: str, *, saved: bool) -> bool:
        """Evict until ``size`` bytes fit. Return False if only more valuable blocks could be evicted."""
        if self.index.used_bytes + size > self.capacity_bytes:
            now_s = self._wall_clock()
            with self.index.lock:
                ended = [name for name, _ in takewhile(lambda item: item[1] <= now_s, self._inherited.items())]
            self.mark(ended, None)
        while True:
            with self.index.lock:
                if self.index.used_bytes + size <= self.capacity_bytes:
                    return True
                victim = self.index.next_victim(owner, saved=saved)
                if victim is None:
                    return False
                self._forget(victim.block.block_hash)
            self.counts.evicted_blocks += 1
            self._give(victim)
            self._files.remove(victim.block.block_hash, victim.saved_until_s)

    def _give(self, victim: Entry) -> None:
        """Give an evicted block to the tier below."""
        if self._below is not None:
            try:
                block, row = self._files.read(victim.block.block_hash, victim.saved_until_s)
            except (OSError, TransferError):
                self.refused_files += 1
            else:
                self._below.put([block], lambda _, rows: np.copyto(rows[0], row))

    def _forget(self, block_hash: bytes) -> bool:
        """Remove a block from the index, if it is indexed. The caller holds the lock."""
        if block_hash not in self.index:
            return False
        self.index.remove(block_hash)
        self._inherited.pop(block_hash, None)
        return True

    def _now_ns(self) -> int:
        """Return a time that rises with every call. After a restart, only file times preserve the order of use."""
        self._used_ns = max(self._used_ns + 1, time.time_ns())
        return self._used_ns

    def _scan(self, clock: Callable[[], float], limit_s: float, save_ttl_s: float | None) -> None:
        """Index a previous run's files within the time limit, saved and recent ones first. Then evict to capacity."""
        deadline_s, now_s = clock() + limit_s, self._wall_clock()
        files = sorted(
            self._files.scan(), key=lambda file: (file.saved_until_s is not None, file.used_ns), reverse=True
        )
        kept: dict[bytes, tuple[FoundFile, TierBlock]] = {}
        for file in files:
            late = clock() > deadline_s
            block = self._believe(file) if file.block_hash not in kept and not late else None
            if block is None:
                self._files.remove(file.block_hash, file.saved_until_s)
            else:
                kept[file.block_hash] = (file, block)
        for file, block in sorted(kept.values(), key=lambda pair: pair[0].used_ns):
            self.index.add(Entry(block, file.size, file.saved_until_s))
            self._used_ns = file.used_ns
            if block.owner != UNKNOWN:
                self.index.touch(block.owner, max(0.0, now_s - file.used_ns / 1e9))
        self._inherit(now_s, math.inf if save_ttl_s is None else now_s + save_ttl_s)
        self._make_room(0, UNKNOWN, saved=True)
        self.index.announce()

    def _inherit(self, now_s: float, latest_s: float) -> None:
        """Limit the saves of a previous run to ``latest_s``, and end expired ones."""
        saved = [(filed.saved_until_s, filed) for filed in self.index if filed.saved_until_s is not None]
        for until_s, filed in sorted(saved, key=lambda pair: pair[0]):
            bounded_s = min(until_s, float(math.floor(latest_s)) if latest_s < math.inf else math.inf)
            self.mark([filed.block.block_hash], bounded_s if bounded_s > now_s else None)
            if now_s < bounded_s < math.inf:
                self._inherited[filed.block.block_hash] = bounded_s

    def _believe(self, file: FoundFile) -> TierBlock | None:
        try:
            return self._files.read_header(file)
        except (OSError, TransferError) as error:
            self.refused_files += 1
            _log.warning("a file of the disk tier was dropped: %s", error)
            return None
