"""The tiers below the pool as one: pool -> host memory -> disk.

The engine's loop owns it. Only the disk queue has a thread. A batch has children first, so heads are evicted last.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from router.protocol.events import TierDigest
from router.protocol.samples import Labels, Sample
from serve_app.cache.kv_chain import KvFormat, Row
from serve_app.cache.prefix_digest import TierBlock
from serve_app.cache.tiers.disk import DiskTier
from serve_app.cache.tiers.disk_files import BlockFiles, DiskSlot
from serve_app.cache.tiers.disk_queue import DiskLoad, DiskQueue, Wake
from serve_app.cache.tiers.host import HostTier
from serve_app.cache.tiers.tier_index import TierEvent, TierIndex, account_key
from serve_app.config.cache import CacheSection

ReadRows = Callable[[Sequence[int], Sequence[Row]], None]
"""Copies the batch's blocks at these indices from the pool into the given rows."""

_DEFAULTS = CacheSection()


@dataclass(frozen=True, slots=True)
class TierSettings:
    """Bounds of the tiers; 0 bytes: off. ``save_ttl_s``: the maximum for a previous run's saves; None: no limit."""

    host_bytes: int = 0
    disk_bytes: int = 0
    disk_dir: Path | None = None
    disk_queue_bytes: int = _DEFAULTS.disk_queue_bytes
    load_ratio: float = _DEFAULTS.tier_load_ratio
    save_ttl_s: float | None = None


class Tiers:
    """Host memory and disk below one pool. ``size_bytes``: of a block. ``indexes``: of each tier, the fastest first."""

    def __init__(
        self,
        settings: TierSettings,
        kv_format: KvFormat,
        size_bytes: int,
        wake: Wake,
        *,
        shares: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
        start: bool = True,
    ) -> None:
        """Open the tiers. The disk keeps a previous run's files. Raises DiskTierError or ValueError."""
        for name, bound in (("host_cache_bytes", settings.host_bytes), ("disk_cache_bytes", settings.disk_bytes)):
            if 0 < bound < size_bytes:
                raise ValueError(f"{name}={bound} cannot hold one KV block of {size_bytes} bytes")
        self.size_bytes = size_bytes
        self._row_bytes = kv_format.block_bytes
        self.indexes: dict[str, TierIndex[Any]] = {}
        self.host: HostTier | None = None
        self.disk: DiskQueue | None = None
        """The disk tier's queue, or None without a disk tier."""
        self._slot: DiskSlot | None = None
        if settings.host_bytes:
            self.host = HostTier(settings.host_bytes, size_bytes, self._row_bytes, shares or {}, clock)
            self.indexes["host"] = self.host
        if settings.disk_bytes:
            if settings.disk_dir is None:
                raise ValueError("disk_cache_bytes needs disk_cache_dir")
            self._slot = DiskSlot(settings.disk_dir)
            files = BlockFiles(self._slot.path, kv_format)
            tier = DiskTier(files, settings.disk_bytes, shares=shares, save_ttl_s=settings.save_ttl_s, clock=clock)
            self.disk = DiskQueue(tier, settings.disk_queue_bytes, size_bytes, wake)
            self.indexes["disk"] = tier.index
            if start:
                self.disk.start()

    @property
    def has_news(self) -> bool:
        """Whether ``take_events`` has events."""
        return any(index.has_events for index in self.indexes.values())

    def seen(self, tenants: Iterable[str]) -> None:
        """Record requests of tenants. Each has a share from now on."""
        owners = list(map(account_key, tenants))
        for index in self.indexes.values():
            with index.lock:
                for owner in owners:
                    index.touch(owner)

    def set_shares(self, shares: Mapping[str, float]) -> None:
        """Use new tenant weights from now on."""
        for index in self.indexes.values():
            with index.lock:
                index.set_weights(shares)

    def find(self, block_hash: bytes) -> tuple[TierBlock, str] | None:
        """Return a block's description and its fastest tier."""
        held = self.host.find(block_hash) if self.host is not None else None
        if held is not None:
            return held, "host"
        filed = self.disk.find(block_hash) if self.disk is not None else None
        return (filed, "disk") if filed is not None else None

    def row(self, block_hash: bytes) -> Row | None:
        """Return the bytes of a block in host memory, a view until the next spill."""
        return self.host.row(block_hash) if self.host is not None and block_hash in self.host else None

    def use(self, hashes: Sequence[bytes]) -> None:
        """Mark blocks in host memory (parents first) as needed, so that they are evicted last."""
        for block_hash in reversed(hashes):
            if self.host is not None and block_hash in self.host:
                self.host.use(block_hash)

    def load(self, hashes: Sequence[bytes]) -> DiskLoad:
        """Start reading blocks from disk, parents first."""
        assert self.disk is not None
        return self.disk.load(hashes)

    def spill(self, blocks: Sequence[TierBlock], read: ReadRows) -> None:
        """Store blocks that leave the pool, children first. Blocks already held are only marked as used."""
        if self.host is None:
            self._to_disk(blocks, read)
            return
        step = self.host.capacity_blocks
        for start in range(0, len(blocks), step):
            self._to_host(self.host, blocks[start : start + step], start, read)

    def save(self, blocks: Sequence[TierBlock], read: ReadRows, until_s: float) -> bool:
        """Write or mark blocks (children first) on disk as saved until a Unix time; False: no disk or no space."""
        return self._to_disk(blocks, read, until_s)

    def end_save(self, hashes: Sequence[bytes]) -> None:
        """Make saved blocks on disk ordinary blocks again."""
        if self.disk is not None:
            self.disk.mark(hashes, None)

    def clear(self) -> None:
        """Forget all blocks, including saved ones."""
        if self.host is not None:
            self.host.clear()
        if self.disk is not None:
            self.disk.clear()

    def announce(self) -> None:
        """Announce all held blocks again, for routers that were told to forget the whole replica."""
        for index in self.indexes.values():
            with index.lock:
                index.announce()

    def take_events(self) -> list[TierEvent]:
        """Return the events since the last call."""
        events: list[TierEvent] = []
        for index in self.indexes.values():
            with index.lock:
                events += index.take_events()
        return events

    def digests(self) -> list[TierDigest]:
        """Return each tier's digest as of the last ``take_events``."""
        return [index.digest for index in self.indexes.values()]

    def wait_for_room(self, blocks: int, deadline_s: float) -> None:
        """Block until the disk's queue has space for ``blocks``, or is empty, or until ``deadline_s`` (monotonic)."""
        while (disk := self.disk) is not None and disk.pending_blocks and disk.room() < blocks:
            if time.monotonic() >= deadline_s:
                return
            time.sleep(0.002)

    def close(self, deadline_s: float) -> None:
        """Write blocks held only in host memory, end the thread at about ``deadline_s``, and release the directory."""
        if self.disk is not None:
            if self.host is not None:
                for entry in self.host:
                    self.wait_for_room(1, deadline_s)
                    self._host_to_disk(self.host, entry.block)
            self.disk.stop(max(0.0, deadline_s - time.monotonic()))
            self.disk = None
        if self._slot is not None:
            self._slot.release()

    def samples(self, labels: Labels) -> Iterable[Sample]:
        """Yield blocks, bytes and counters by tier."""
        for tier, index in self.indexes.items():
            by_tier, counts = (*labels, ("tier", tier)), index.counts
            yield "warmpath_kv_tier_blocks", by_tier, float(len(index))
            yield "warmpath_kv_tier_bytes", by_tier, float(index.used_bytes)
            yield "warmpath_kv_tier_hits_total", by_tier, float(counts.hits)
            yield "warmpath_kv_tier_stores_total", by_tier, float(counts.stores)
            yield "warmpath_kv_tier_drops_total", by_tier, float(counts.drops)
            yield "warmpath_kv_tier_evicted_blocks_total", by_tier, float(counts.evicted_blocks)
        if self.disk is not None:
            by_tier = (*labels, ("tier", "disk"))
            yield "warmpath_kv_tier_refused_files_total", by_tier, float(self.disk.tier.refused_files)
            yield "warmpath_kv_tier_pending_blocks", by_tier, float(self.disk.pending_blocks)

    def _to_host(self, host: HostTier, batch: Sequence[TierBlock], base: int, read: ReadRows) -> None:
        """Store a batch that fits the tier."""
        for block in batch:
            if block.block_hash in host:
                host.use(block.block_hash)
        fresh: dict[bytes, tuple[int, Row]] = {}
        for i, block in enumerate(batch):
            held = host.find(block.block_hash)
            if held is None:
                if host.full:
                    victim = host.next_victim(block.owner)
                    assert victim is not None, "nothing is saved in host memory"
                    if victim.block.block_hash in fresh:  # from this batch: its owner has no other space
                        self._fill(host, fresh, read)
                    self._host_to_disk(host, victim.block)
                    host.remove(victim.block.block_hash)
                    host.counts.evicted_blocks += 1
                fresh[block.block_hash] = (base + i, host.put(block))
            elif held.prefix_digest == block.prefix_digest:
                host.use(block.block_hash)
            else:
                host.counts.drops += 1
        self._fill(host, fresh, read)

    def _fill(self, host: HostTier, fresh: dict[bytes, tuple[int, Row]], read: ReadRows) -> None:
        """Fill the new rows from the pool, and empty ``fresh``."""
        if fresh:
            wanted, rows = zip(*fresh.values(), strict=True)
            read(wanted, rows)
            host.counts.stores += len(rows)
            fresh.clear()

    def _host_to_disk(self, host: HostTier, block: TierBlock) -> None:
        row = host.row(block.block_hash)
        self._to_disk([block], lambda _, rows: np.copyto(rows[0], row))

    def _to_disk(self, batch: Sequence[TierBlock], read: ReadRows, saved_until_s: float | None = None) -> bool:
        """Offer a batch. If the queue has too little space, prefix heads are stored and tails dropped."""
        disk = self.disk
        if disk is None:
            return False
        fresh: list[int] = []
        held: list[bytes] = []
        foreign = 0
        for i, block in enumerate(batch):
            known = disk.find(block.block_hash)
            if known is None:
                fresh.append(i)
            elif known.prefix_digest == block.prefix_digest:
                held.append(block.block_hash)
            else:
                foreign += 1
        if held:
            disk.touch(held)
            if saved_until_s is not None:
                disk.mark(held, saved_until_s)
        excess = max(0, len(fresh) - disk.room())
        disk.tier.index.counts.drops += excess + foreign
        fresh = fresh[excess:]
        rows = list(np.empty((len(fresh), self._row_bytes), dtype=np.uint8))
        if fresh:
            read(fresh, rows)
        taken = [disk.offer(batch[i], row, saved_until_s) for i, row in zip(fresh, rows, strict=True)]
        return all(taken) and not excess and not foreign
