"""Blocks in files, with tenants' shares of the space and the expiry of saves.

Only the queue's thread stores, loads and marks. Any thread may look up. The expiry in a file's name survives a restart.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from serve_app.cache.kv_chain import Row, TransferError, WrongChain
from serve_app.cache.prefix_digest import TierBlock
from serve_app.cache.tiers.disk_files import BlockFiles, DiskSlot, FoundFile
from serve_app.cache.tiers.tier import Tier, TierParts, Wanted
from serve_app.cache.tiers.tier_index import UNKNOWN, Entry, TierCounts, TierIndex
from serve_app.cache.tiers.tier_queue import TierQueue

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
        held = self.index.find(block.block_hash)
        return None if held is None else held.prefix_digest == block.prefix_digest

    def holds(self, wanted: Wanted | TierBlock) -> bool:
        """Return whether a block is stored (any thread)."""
        return self.known(wanted) is True

    def store(self, block: TierBlock, row: Row, saved_until_s: float | None = None, *, life: int | None = None) -> bool:
        """Write a block, after evictions if needed, and return whether it is stored. ``life``: when it was offered."""
        life = self.life if life is None else life
        block_hash = block.block_hash
        known = self.known(block)
        if known is not None:
            if not known:
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

    def read(self, wanted: Sequence[Wanted]) -> Iterator[tuple[TierBlock, Row]]:
        """Yield the blocks that can be read, up to the first that cannot."""
        for one in wanted:
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
