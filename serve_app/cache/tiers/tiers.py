"""The tiers below the pool as one: pool -> host memory -> disk.

Owns what moves down and in which order, the events of the host tier, and the counters. The engine's loop owns it; only
the disk queue has a thread. A batch comes children before parents, so the heads of prefixes are always the last to go.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from router.protocol.events import BlocksRemoved, BlocksStored, TierDigest
from router.protocol.samples import Labels, Sample
from serve_app.cache.kv_chain import KvFormat, Row
from serve_app.cache.prefix_digest import TierBlock
from serve_app.cache.tiers.disk import DiskTier
from serve_app.cache.tiers.disk_files import BlockFiles, DiskSlot
from serve_app.cache.tiers.disk_queue import DiskLoad, DiskQueue, Wake
from serve_app.cache.tiers.host import HostTier
from serve_app.cache.tiers.tier_index import account_key

TierEvent = BlocksStored | BlocksRemoved
ReadRows = Callable[[Sequence[int], Sequence[Row]], None]
"""Copies the batch's blocks of these indices out of the pool, each into its row."""


@dataclass(frozen=True, slots=True)
class TierSettings:
    """Bounds of the tiers; 0 bytes is off. ``load_ratio``: see ``LoadRule``.

    ``save_ttl_s``: how long a save that an earlier life left on disk stays one at most; None: for ever.
    """

    host_bytes: int = 0
    disk_bytes: int = 0
    disk_dir: Path | None = None
    disk_queue_bytes: int = 256 * 1024 * 1024
    load_ratio: float = 1.0
    save_ttl_s: float | None = None


@dataclass(slots=True)
class TierCounts:
    """Blocks over an engine's life."""

    hits: int = 0
    stores: int = 0
    drops: int = 0
    evicted: int = 0


class Tiers:
    """Host memory and disk under one pool. ``size_bytes``: what a block counts. ``shares``: weights by tenant."""

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
        """Open the tiers, the disk's with what an earlier life left. Raises DiskTierError or ValueError."""
        for name, bound in (("host_cache_bytes", settings.host_bytes), ("disk_cache_bytes", settings.disk_bytes)):
            if 0 < bound < size_bytes:
                raise ValueError(f"{name}={bound} cannot hold one KV block of {size_bytes} bytes")
        self.size_bytes = size_bytes
        self._row_bytes = kv_format.block_bytes
        self.counts = {"host": TierCounts(), "disk": TierCounts()}
        self._host: HostTier | None = None
        if settings.host_bytes:
            self._host = HostTier(settings.host_bytes, size_bytes, self._row_bytes, shares or {}, clock)
        self._slot: DiskSlot | None = None
        self.disk: DiskQueue | None = None
        """The disk tier's queue, where there is one."""
        self._events: list[TierEvent] = []
        if settings.disk_bytes:
            if settings.disk_dir is None:
                raise ValueError("disk_cache_bytes needs disk_cache_dir")
            self._slot = DiskSlot(settings.disk_dir)
            files = BlockFiles(self._slot.path, kv_format)
            tier = DiskTier(files, settings.disk_bytes, shares=shares, save_ttl_s=settings.save_ttl_s, clock=clock)
            self.disk = DiskQueue(tier, settings.disk_queue_bytes, size_bytes, wake)
            if start:
                self.disk.start()

    @property
    def has_news(self) -> bool:
        """Whether ``take_events`` has anything."""
        return bool(self._events) or (self.disk is not None and self.disk.tier.has_events)

    def seen(self, tenants: Iterable[str]) -> None:
        """Note requests of tenants: each has a share from now on."""
        for owner in map(account_key, tenants):
            if self._host is not None:
                self._host.index.touch(owner)
            if self.disk is not None:
                self.disk.tier.seen(owner)

    def set_shares(self, shares: Mapping[str, float]) -> None:
        """Go by other weights of tenants from now on."""
        if self._host is not None:
            self._host.index.set_weights(shares)
        if self.disk is not None:
            self.disk.tier.set_shares(shares)

    def find(self, block_hash: bytes) -> tuple[TierBlock, str] | None:
        """Return what is known of a block and its fastest tier."""
        if self._host is not None:
            held = self._host.get(block_hash)
            if held is not None:
                return held, "host"
        filed = self.disk.find(block_hash) if self.disk is not None else None
        return (filed, "disk") if filed is not None else None

    def row(self, block_hash: bytes) -> Row | None:
        """Return the bytes of a block in host memory, a view until the next spill."""
        return self._host.row(block_hash) if self._host is not None and block_hash in self._host else None

    def use(self, hashes: Sequence[bytes]) -> None:
        """Note that blocks in host memory (parents first) are wanted: they are the last to go."""
        for block_hash in reversed(hashes):
            if self._host is not None and block_hash in self._host:
                self._host.touch(block_hash)

    def load(self, hashes: Sequence[bytes]) -> DiskLoad:
        """Start reading blocks from disk, parents first."""
        assert self.disk is not None
        return self.disk.load(hashes)

    def spill(self, blocks: Sequence[TierBlock], read: ReadRows) -> None:
        """Take blocks that leave the pool, children first; what is held already is only used again."""
        if self._host is None:
            self._to_disk(blocks, read)
            return
        step = self._host.capacity_blocks
        for start in range(0, len(blocks), step):
            self._to_host(self._host, blocks[start : start + step], start, read)

    def save(self, blocks: Sequence[TierBlock], read: ReadRows, until_s: float) -> bool:
        """Write or mark blocks of the pool (children first) on disk as saved until a Unix time (inf: for ever).

        False without a disk tier or room in its queue.
        """
        return self._to_disk(blocks, read, until_s) if self.disk is not None else False

    def end_save(self, hashes: Sequence[bytes]) -> None:
        """Let blocks on disk be evicted as others are."""
        if self.disk is not None:
            self.disk.mark(hashes, None)

    def clear(self) -> None:
        """Forget everything, the saved too."""
        if self._host is not None:
            self._tell(BlocksRemoved(b"".join(block.block_hash for block in self._host.blocks()), "host"))
            self._host.clear()
        if self.disk is not None:
            self.disk.clear()

    def announce(self) -> None:
        """Tell again what is held: for routers that were told to forget the whole replica."""
        self.take_events()
        if self._host is not None:
            held = [block.block_hash for block in self._host.blocks()]
            self._tell(BlocksStored(b"".join(reversed(held)), "host"))
        event = self.disk.tier.announce() if self.disk is not None else None
        if event is not None:
            self._events.append(event)

    def take_events(self) -> list[TierEvent]:
        """Return the events since the last call; each tier's own are in order."""
        events, self._events = self._events, []
        if self.disk is not None:
            events.extend(self.disk.tier.take_events())
        return events

    def digests(self) -> Iterable[TierDigest]:
        """Yield what each tier held as of the last ``take_events``."""
        if self._host is not None:
            yield TierDigest("host", len(self._host), self._host.index.xor)
        if self.disk is not None:
            yield self.disk.tier.told

    def wait_for_room(self, blocks: int, deadline_s: float) -> None:
        """Block until the disk's queue has room for ``blocks`` (or is empty), or until ``monotonic()`` is later."""
        while (disk := self.disk) is not None and disk.pending_blocks and disk.room() < blocks:
            if time.monotonic() >= deadline_s:
                return
            time.sleep(0.002)

    def close(self, deadline_s: float) -> None:
        """Write what host memory alone holds, end the thread at about ``deadline_s``, let the directory go."""
        if self.disk is not None:
            if self._host is not None:
                for block in list(self._host.blocks()):
                    self.wait_for_room(1, deadline_s)
                    self._write_to_disk(self.disk, block, self._host.row(block.block_hash))
            self.disk.stop(max(0.0, deadline_s - time.monotonic()))
            self.disk = None
        if self._slot is not None:
            self._slot.release()

    def samples(self, labels: Labels) -> Iterable[Sample]:
        """Yield blocks, bytes and counters by tier."""
        disk = self.disk
        held: dict[str, tuple[int, int]] = {}
        if self._host is not None:
            held["host"] = len(self._host), self._host.used_bytes
        if disk is not None:
            held["disk"] = len(disk.tier), disk.tier.used_bytes
            counts = self.counts["disk"]
            counts.stores, counts.drops, counts.evicted = (
                disk.stored_blocks,
                disk.dropped_blocks,
                disk.tier.evicted_blocks,
            )
        for tier, (blocks, used_bytes) in held.items():
            by_tier = (*labels, ("tier", tier))
            counts = self.counts[tier]
            yield "warmpath_kv_tier_blocks", by_tier, float(blocks)
            yield "warmpath_kv_tier_bytes", by_tier, float(used_bytes)
            yield "warmpath_kv_tier_hits_total", by_tier, float(counts.hits)
            yield "warmpath_kv_tier_stores_total", by_tier, float(counts.stores)
            yield "warmpath_kv_tier_drops_total", by_tier, float(counts.drops)
            yield "warmpath_kv_tier_evicted_blocks_total", by_tier, float(counts.evicted)
        if disk is not None:
            by_tier = (*labels, ("tier", "disk"))
            yield "warmpath_kv_tier_refused_files_total", by_tier, float(disk.tier.refused_files)
            yield "warmpath_kv_tier_pending_blocks", by_tier, float(disk.pending_blocks)

    def _tell(self, event: TierEvent) -> None:
        if event.hashes:
            self._events.append(event)

    def _to_host(self, host: HostTier, batch: Sequence[TierBlock], base: int, read: ReadRows) -> None:
        """Put a batch that fits the tier."""
        for block in batch:
            if block.block_hash in host:
                host.touch(block.block_hash)
        fresh: dict[bytes, tuple[int, Row]] = {}
        for i, block in enumerate(batch):
            held = host.get(block.block_hash)
            if held is None:
                if host.full:
                    victim = host.next_victim(block.owner)
                    if victim.block_hash in fresh:  # of the batch itself: its owner has no room left but its own
                        self._fill(fresh, read)
                    self._evict_host(host, victim)
                fresh[block.block_hash] = (base + i, host.put(block))
            elif held.prefix_digest == block.prefix_digest:
                host.touch(block.block_hash)
            else:
                self.counts["host"].drops += 1
        self._fill(fresh, read)

    def _fill(self, fresh: dict[bytes, tuple[int, Row]], read: ReadRows) -> None:
        """Read what was put (children first) and tell of it; ``fresh`` is empty afterwards."""
        if fresh:
            wanted, rows = zip(*fresh.values(), strict=True)
            read(wanted, rows)
            self.counts["host"].stores += len(rows)
            self._tell(BlocksStored(b"".join(reversed(fresh)), "host"))
            fresh.clear()

    def _evict_host(self, host: HostTier, block: TierBlock) -> None:
        if self.disk is not None:
            self._write_to_disk(self.disk, block, host.row(block.block_hash))
        host.evict(block.block_hash)
        self.counts["host"].evicted += 1
        self._tell(BlocksRemoved(block.block_hash, "host"))

    @staticmethod
    def _write_to_disk(disk: DiskQueue, block: TierBlock, row: Row) -> None:
        known = disk.find(block.block_hash)
        if known is not None and known.prefix_digest == block.prefix_digest:
            disk.touch([block.block_hash])
        elif known is not None or disk.room() <= 0:
            disk.dropped_blocks += 1
        else:
            disk.offer(block, row.copy())

    def _to_disk(self, batch: Sequence[TierBlock], read: ReadRows, saved_until_s: float | None = None) -> bool:
        """Offer a batch straight from the pool. Where the queue is short of room, the heads go in and tails do not."""
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
        excess = max(0, len(fresh) - max(0, disk.room()))
        disk.dropped_blocks += excess + foreign
        fresh = fresh[excess:]
        rows = list(np.empty((len(fresh), self._row_bytes), dtype=np.uint8))
        if fresh:
            read(fresh, rows)
        taken = [disk.offer(batch[i], row, saved_until_s) for i, row in zip(fresh, rows, strict=True)]
        return all(taken) and not excess and not foreign
