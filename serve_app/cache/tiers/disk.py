"""Blocks in files: the index, its order, its bound, and what it announces.

Owns which block has a file. One thread (the queue's) stores, loads and marks; any thread may look up. Events are
gathered under the lock that guards the index, in its order. Saved blocks go after all others, and never for one that is
not saved.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from router.protocol.events import BlocksRemoved, BlocksStored
from serve_app.cache.kv_chain import Row, TransferError, WrongChain
from serve_app.cache.prefix_digest import TierBlock
from serve_app.cache.tiers.disk_files import BlockFiles, FoundFile

_log = logging.getLogger(__name__)

TIER = "disk"
SCAN_LIMIT_S = 10.0
"""How long a start may read headers; files not reached by then, the longest unused, are dropped."""


@dataclass(slots=True)
class _IndexedFile:
    block: TierBlock
    size: int


class DiskTier:
    """At most ``capacity_bytes`` of files, headers included."""

    def __init__(
        self,
        files: BlockFiles,
        capacity_bytes: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        scan_limit_s: float = SCAN_LIMIT_S,
    ) -> None:
        """Index what an earlier life left in the directory."""
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.refused_files = 0
        self.failed_writes = 0
        self.evicted_blocks = 0
        self._files = files
        self._lock = threading.Lock()
        self._index: dict[bool, OrderedDict[bytes, _IndexedFile]] = {False: OrderedDict(), True: OrderedDict()}
        self._events: list[BlocksStored | BlocksRemoved] = []
        self._life = 0
        self._used_ns = 0
        self._scan(clock, scan_limit_s)

    def __len__(self) -> int:
        return len(self._index[False]) + len(self._index[True])

    @property
    def has_events(self) -> bool:
        """Whether ``take_events`` has anything (any thread)."""
        return bool(self._events)

    def get(self, block_hash: bytes) -> TierBlock | None:
        """Return what is known of a block that has a file (any thread)."""
        filed = self._index[False].get(block_hash) or self._index[True].get(block_hash)
        return filed.block if filed else None

    def hashes(self, *, saved: bool | None = None) -> frozenset[bytes]:
        """Return the hashes of all blocks, or of those that are saved, or not."""
        with self._lock:
            return frozenset(h for kind, held in self._index.items() if saved in (None, kind) for h in held)

    def take_events(self) -> list[BlocksStored | BlocksRemoved]:
        """Return the events since the last call (any thread)."""
        if not self._events:
            return []
        with self._lock:
            events, self._events = self._events, []
        return events

    def store(self, block: TierBlock, row: Row, *, saved: bool = False) -> bool:
        """Write a block, making room; return whether it is filed now. A failed write is logged and counted."""
        block_hash = block.block_hash
        known = self.get(block_hash)
        if known is not None:
            if known.prefix_digest != block.prefix_digest:
                return False
            self.touch([block_hash])
            return self.mark_saved([block_hash]) == 1 if saved else True
        content = self._files.encode(block, row)
        life = self._life
        if not self._make_room(len(content), for_saved=saved):
            return False
        try:
            self._files.write(block_hash, content, saved=saved, used_ns=self._now_ns())
        except OSError as error:
            self.failed_writes += 1
            _log.warning("a KV block could not be written to disk: %s", error.strerror)
            return False
        with self._lock:
            if life == self._life:
                self._index[saved][block_hash] = _IndexedFile(block, len(content))
                self.used_bytes += len(content)
                self._events.append(BlocksStored(block_hash, TIER))
                return True
        self._files.remove(block_hash, saved=saved)
        return False

    def load(self, block_hash: bytes) -> tuple[TierBlock, Row] | None:
        """Read a block; one whose file is gone, torn or foreign is forgotten with a warning."""
        saved = block_hash in self._index[True]
        filed = self._index[saved].get(block_hash)
        if filed is None:
            return None
        try:
            block, row = self._files.read(block_hash, saved=saved)
            if block.prefix_digest != filed.block.prefix_digest:
                raise WrongChain("the file was exchanged")
            return block, row
        except (OSError, TransferError) as error:
            if self._forget(block_hash):
                self.refused_files += 1
                _log.warning("a KV block's file was dropped: %s", error)
                self._files.remove(block_hash, saved=saved)
            return None

    def touch(self, block_hashes: Iterable[bytes]) -> None:
        """Make blocks the most recently used ones, in that order: children before their parents."""
        for block_hash in block_hashes:
            with self._lock:
                saved = block_hash in self._index[True]
                if block_hash not in self._index[saved]:
                    continue
                self._index[saved].move_to_end(block_hash)
            try:
                self._files.touch(block_hash, saved=saved, used_ns=self._now_ns())
            except OSError as error:
                _log.warning("a KV block's time of use was not noted: %s", error.strerror)

    def mark_saved(self, block_hashes: Iterable[bytes]) -> int:
        """Mark blocks as saved, on disk too; return how many of them are saved now."""
        marked = 0
        for block_hash in block_hashes:
            if block_hash in self._index[False]:
                try:
                    self._files.mark_saved(block_hash)
                except OSError as error:
                    _log.warning("a KV block could not be marked: %s", error.strerror)
                    continue
                with self._lock:
                    filed = self._index[False].pop(block_hash, None)
                    if filed is not None:
                        self._index[True][block_hash] = filed
            marked += block_hash in self._index[True]
        return marked

    def forget_all(self) -> Callable[[], None]:
        """Forget every block at once (any thread) and return what unlinks the files, for the queue's thread."""
        with self._lock:
            self._life += 1
            gone = [(block_hash, saved) for saved, held in self._index.items() for block_hash in held]
            for held in self._index.values():
                held.clear()
            self.used_bytes = 0
            if gone:
                self._events.append(BlocksRemoved(b"".join(block_hash for block_hash, _ in gone), TIER))

        def unlink() -> None:
            for block_hash, saved in gone:
                self._files.remove(block_hash, saved=saved)

        return unlink

    def announce(self) -> BlocksStored | None:
        """Return an event that names everything held, parents first (any thread)."""
        with self._lock:
            held = [h for kind in (True, False) for h in reversed(self._index[kind])]
        return BlocksStored(b"".join(held), TIER) if held else None

    def _make_room(self, size: int, *, for_saved: bool) -> bool:
        while self.used_bytes + size > self.capacity_bytes:
            with self._lock:
                saved = not self._index[False]
                if saved and not (for_saved and self._index[True]):
                    return False
                block_hash = next(iter(self._index[saved]))
            self._forget(block_hash)
            self.evicted_blocks += 1
            self._files.remove(block_hash, saved=saved)
        return True

    def _forget(self, block_hash: bytes) -> bool:
        with self._lock:
            filed = self._index[False].pop(block_hash, None) or self._index[True].pop(block_hash, None)
            if filed is None:
                return False
            self.used_bytes -= filed.size
            self._events.append(BlocksRemoved(block_hash, TIER))
            return True

    def _now_ns(self) -> int:
        """Return a time that rises with every call: file times are all that is left of the order after a restart."""
        self._used_ns = max(self._used_ns + 1, time.time_ns())
        return self._used_ns

    def _scan(self, clock: Callable[[], float], limit_s: float) -> None:
        """Index the files of an earlier life, saved and recent ones first, within the bound and the time."""
        deadline_s = clock() + limit_s
        found = sorted(self._files.scan(), key=lambda file: (file.saved, file.used_ns), reverse=True)
        kept: list[tuple[FoundFile, TierBlock]] = []
        seen: set[bytes] = set()
        for file in found:
            block = None
            late = clock() > deadline_s
            if file.block_hash not in seen and not late and self.used_bytes + file.size <= self.capacity_bytes:
                block = self._believe(file)
            if block is None:
                self._files.remove(file.block_hash, saved=file.saved)
                continue
            seen.add(file.block_hash)
            kept.append((file, block))
            self.used_bytes += file.size
        for file, block in reversed(kept):
            self._index[file.saved][file.block_hash] = _IndexedFile(block, file.size)
            self._used_ns = max(self._used_ns, file.used_ns)
        event = self.announce()
        if event is not None:
            self._events.append(event)

    def _believe(self, file: FoundFile) -> TierBlock | None:
        try:
            return self._files.read_header(file)
        except (OSError, TransferError) as error:
            self.refused_files += 1
            _log.warning("a file of the disk tier was dropped: %s", error)
            return None
