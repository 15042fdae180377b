"""A tier behind a thread: the thread between an engine's loop and a store that takes its time.

It owns the bounded queue of writes and the loads in progress. Loads have priority over writes. A block that waits to be
written is loaded from memory. If the queue is full, a write is dropped without waiting. Only the queued work runs in
the thread; all methods are for the engine's loop, and ``put`` also for the thread of the tier above.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, groupby
from queue import Empty, PriorityQueue
from typing import Any, Protocol

import numpy as np

from router.protocol.samples import Labels, Sample
from serve_app.cache.kv_chain import Row
from serve_app.cache.prefix_digest import TierBlock
from serve_app.cache.tiers.tier import ReadRows, Tier, TierLoad, TierParts, Wanted
from serve_app.cache.tiers.tier_index import TierCounts, TierIndex

_log = logging.getLogger(__name__)

_LOAD, _TASK, _END = range(3)
"""Priorities, the lowest first."""


class BlockStore(Protocol):
    """Where a queue's blocks are. ``life``: the number of resets. Its thread calls all but ``known`` and ``holds``."""

    name: str
    expected_bytes_per_s: float
    life: int
    refused_files: int

    @property
    def index(self) -> TierIndex[Any] | None:
        """See ``Tier``."""

    @property
    def counts(self) -> TierCounts:
        """Counters since the start."""

    def learn(self, scope: bytes, root: bytes) -> None:
        """See ``Tier.learn`` (any thread)."""

    def known(self, block: TierBlock) -> bool | None:
        """Return whether a block is stored already (any thread); False: another one has its hash."""

    def holds(self, block: Wanted | TierBlock) -> bool:
        """See ``Tier.holds`` (any thread)."""

    def store(self, block: TierBlock, row: Row, saved_until_s: float | None = None, *, life: int | None = None) -> bool:
        """Write a block, and return whether it is stored. ``life``: when it was offered."""

    def read(self, blocks: Sequence[Wanted]) -> Iterator[tuple[TierBlock, Row]]:
        """Yield the blocks that can be read, up to the first that cannot."""

    def touch(self, block_hashes: Iterable[bytes]) -> None:
        """Mark blocks as the most recently used, children before their parents."""

    def mark(self, block_hashes: Iterable[bytes], saved_until_s: float | None) -> int:
        """Set the expiry of blocks' saves; None: not saved. Return how many were marked."""

    def forget_all(self) -> Callable[[], None]:
        """Forget every block at once (any thread). Return the rest of the work, for the queue's thread."""

    def close(self) -> None:
        """Release what it has (any thread)."""


class TierQueue(Tier):
    """A queue of at most ``max_bytes`` before a store, with ``threads``. Without ``start``, call ``run``."""

    keeps = True

    def __init__(
        self, store: BlockStore, max_bytes: int, parts: TierParts, below: Tier | None = None, *, threads: int = 1
    ) -> None:
        self.store = store
        self.name, self.index, self.counts = store.name, store.index, store.counts
        self.expected_bytes_per_s = store.expected_bytes_per_s
        super().__init__(parts, below)
        self._max_blocks = max(1, max_bytes // parts.size_bytes)
        self._row_bytes = parts.format.block_bytes
        self._wake = parts.wake
        self._work: PriorityQueue[tuple[int, int, Callable[[], object]]] = PriorityQueue()
        self._numbers = count()
        self._pending: dict[bytes, tuple[TierBlock, Row]] = {}
        self._offering, self._counting = threading.Lock(), threading.Lock()
        self._stopping = self._late = False
        name = f"warmpath-{self.name}-tier"
        count_threads = threads if parts.start else 0
        self._threads = [threading.Thread(target=self._loop, name=name, daemon=True) for _ in range(count_threads)]
        for thread in self._threads:
            thread.start()

    @property
    def pending_blocks(self) -> int:
        """The number of blocks that wait to be written."""
        return len(self._pending)

    def holds(self, block: Wanted | TierBlock) -> bool:
        """Return whether a block is stored or waits to be written."""
        pending = self._pending.get(block.block_hash)
        return pending[0].prefix_digest == block.prefix_digest if pending else self.store.holds(block)

    def put(self, blocks: Sequence[TierBlock], read: ReadRows, saved_until_s: float | None = None) -> bool:
        """Queue a batch for writing. If the queue has too little space, prefix heads are stored and tails dropped."""
        fresh: list[int] = []
        stored: list[bytes] = []
        foreign = 0
        for i, block in enumerate(blocks):
            pending = self._pending.get(block.block_hash)
            same = pending[0].prefix_digest == block.prefix_digest if pending else self.store.known(block)
            if same is None:
                fresh.append(i)
            elif same:
                stored.append(block.block_hash)
            else:
                foreign += 1
        if stored:
            self._enqueue(lambda: self.store.touch(stored))
            if saved_until_s is not None:
                self.mark(stored, saved_until_s)
        with self._offering:
            excess = max(0, len(fresh) - self.room())
            self.counts.drops += excess + foreign
            fresh = fresh[excess:]
            rows = list(np.empty((len(fresh), self._row_bytes), dtype=np.uint8))
            if fresh:
                read(fresh, rows)
            taken = [self.offer(blocks[i], row, saved_until_s) for i, row in zip(fresh, rows, strict=True)]
        return all(taken) and not excess and not foreign

    def room(self) -> int:
        """Return the number of blocks that may be offered now."""
        return max(0, self._max_blocks - len(self._pending))

    def offer(self, block: TierBlock, row: Row, saved_until_s: float | None = None) -> bool:
        """Queue a block for writing; the queue then owns ``row``. If full, count a drop and return False."""
        if self._stopping or not self.room():
            self.counts.drops += 1
            return False
        offered = self._pending[block.block_hash] = (block, row)
        life = self.store.life
        self._enqueue(lambda: self._store(offered, saved_until_s, life))
        return True

    def learn(self, scope: bytes, root: bytes) -> None:
        """Note the root of a scope, by the scope's digest."""
        self.store.learn(scope, root)

    def load(self, blocks: Sequence[Wanted]) -> TierLoad:
        """Start reading blocks of one prefix, parents first."""
        load = TierLoad(self, blocks)
        self._enqueue(lambda: self._read(load), _LOAD)
        return load

    def mark(self, hashes: Sequence[bytes], saved_until_s: float | None) -> None:
        """Set the expiry of blocks' saves, including blocks offered before; None: not saved."""
        self._enqueue(lambda: self.store.mark(hashes, saved_until_s))

    def clear(self) -> None:
        """Forget every block, stored or waiting."""
        self._pending.clear()
        self._enqueue(self.store.forget_all())

    def run(self) -> bool:
        """Do one piece of work, loads first, and return False when there is none."""
        try:
            _, _, work = self._work.get_nowait()
        except Empty:
            return False
        work()
        return True

    def wait_for_room(self, blocks: int, deadline_s: float) -> None:
        """Block until the queue has space for ``blocks``, or is empty, or until ``deadline_s`` (monotonic)."""
        while self._threads and self._pending and self.room() < blocks and time.monotonic() < deadline_s:
            time.sleep(0.002)

    def close(self, deadline_s: float) -> None:
        """Refuse new blocks, write queued ones until about ``deadline_s``, end the thread, and release the store."""
        self._stopping = True
        while not self._threads and self.run():
            pass
        for _ in self._threads:
            self._enqueue(lambda: None, _END)
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        self._late = True
        for thread in self._threads:
            thread.join()
        self.store.close()

    def samples(self, labels: Labels) -> Iterable[Sample]:
        """Yield those of every tier, refused files and waiting blocks."""
        yield from super().samples(labels)
        by_tier = (*labels, ("tier", self.name))
        yield "warmpath_kv_tier_refused_files_total", by_tier, float(self.store.refused_files)
        yield "warmpath_kv_tier_pending_blocks", by_tier, float(self.pending_blocks)

    def _enqueue(self, work: Callable[[], object], priority: int = _TASK) -> None:
        self._work.put((priority, next(self._numbers), work))

    def _loop(self) -> None:
        priority = _TASK
        while priority != _END:
            priority, _, work = self._work.get()
            try:
                work()
            except Exception:
                _log.exception("the %s tier failed at one piece of work", self.name)

    def _store(self, offered: tuple[TierBlock, Row], saved_until_s: float | None, life: int) -> None:
        block, row = offered
        try:
            stored = not self._late and self.store.store(block, row, saved_until_s, life=life)
            with self._counting:
                self.counts.stores += stored
                self.counts.drops += not stored
        finally:
            if self._pending.get(block.block_hash) is offered:
                del self._pending[block.block_hash]
        self._wake()

    def _read(self, load: TierLoad) -> None:
        started_s = time.perf_counter()
        try:
            for one, (block, row) in zip(load.wanted, self._blocks(load.wanted), strict=False):
                if block.block_hash != one.block_hash:
                    break
                load.blocks[block.block_hash] = (block, row)
            self.store.touch(reversed(list(load.blocks)))
        finally:
            load.duration_s = time.perf_counter() - started_s
            load.done = True
            self._wake()

    def _blocks(self, blocks: Sequence[Wanted]) -> Iterator[tuple[TierBlock, Row]]:
        """Yield blocks, those that wait to be written from memory; after a missing one any others may follow."""
        for waits, run in groupby(blocks, lambda one: one.block_hash in self._pending):
            ones = list(run)
            pending = (self._pending.get(one.block_hash) for one in ones)
            yield from (block for block in pending if block is not None) if waits else self.store.read(ones)
