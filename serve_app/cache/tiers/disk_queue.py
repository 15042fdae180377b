"""The thread between an engine's loop and its disk tier.

It owns the bounded queue of writes and the loads in progress. Loads have priority over writes. A block that waits to be
written is loaded from memory. If the queue is full, a write is dropped without waiting. Only the queued work runs in
the thread; all methods are for the engine's loop.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from queue import Empty, PriorityQueue

from serve_app.cache.kv_chain import Row
from serve_app.cache.prefix_digest import TierBlock
from serve_app.cache.tiers.disk import DiskTier

_log = logging.getLogger(__name__)

Wake = Callable[[], None]

_LOAD, _TASK, _END = range(3)
"""Priorities, the lowest first."""


class DiskLoad:
    """A load of blocks from disk, children last. Once ``done``, ``blocks`` has the longest readable run."""

    def __init__(self, hashes: Sequence[bytes]) -> None:
        self.hashes = tuple(hashes)
        self.wanted = frozenset(hashes)
        self.blocks: dict[bytes, tuple[TierBlock, Row]] = {}
        self.duration_s = 0.0
        self.observed = False
        self.done = False


class DiskQueue:
    """Work for one disk tier. ``wake``: called from its thread after a result. Without ``start``, call ``run``."""

    def __init__(self, tier: DiskTier, max_bytes: int, block_bytes: int, wake: Wake) -> None:
        self.tier = tier
        self._max_blocks = max(1, max_bytes // block_bytes)
        self._wake = wake
        self._work: PriorityQueue[tuple[int, int, Callable[[], object]]] = PriorityQueue()
        self._numbers = count()
        self._pending: dict[bytes, tuple[TierBlock, Row]] = {}
        self._stopping = self._late = False
        self._thread: threading.Thread | None = None

    @property
    def pending_blocks(self) -> int:
        """The number of blocks that wait to be written."""
        return len(self._pending)

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._loop, name="warmpath-disk-tier", daemon=True)
        self._thread.start()

    def find(self, block_hash: bytes) -> TierBlock | None:
        """Return a block's description if it is stored or waits to be written."""
        pending = self._pending.get(block_hash)
        return pending[0] if pending else self.tier.index.find(block_hash)

    def room(self) -> int:
        """Return the number of blocks that may be offered now."""
        return max(0, self._max_blocks - len(self._pending))

    def offer(self, block: TierBlock, row: Row, saved_until_s: float | None = None) -> bool:
        """Queue a block for writing; the queue then owns ``row``. If full, count a drop and return False."""
        if self._stopping or not self.room():
            self.tier.index.counts.drops += 1
            return False
        offered = self._pending[block.block_hash] = (block, row)
        life = self.tier.life
        self._enqueue(lambda: self._store(offered, saved_until_s, life))
        return True

    def load(self, hashes: Sequence[bytes]) -> DiskLoad:
        """Start reading blocks of one prefix, parents first."""
        load = DiskLoad(hashes)
        self._enqueue(lambda: self._read(load), _LOAD)
        return load

    def touch(self, hashes: Iterable[bytes]) -> None:
        """Record a use of stored blocks, children before parents."""
        wanted = list(hashes)
        self._enqueue(lambda: self.tier.touch(wanted))

    def mark(self, hashes: Iterable[bytes], saved_until_s: float | None) -> None:
        """Set the expiry of blocks' saves, including blocks offered before; None: not saved."""
        wanted = list(hashes)
        self._enqueue(lambda: self.tier.mark(wanted, saved_until_s))

    def clear(self) -> None:
        """Forget every block, stored or waiting."""
        self._pending.clear()
        self._enqueue(self.tier.forget_all())

    def run(self) -> bool:
        """Do one piece of work, loads first, and return False when there is none."""
        try:
            _, _, work = self._work.get_nowait()
        except Empty:
            return False
        work()
        return True

    def stop(self, timeout_s: float) -> None:
        """Refuse new blocks, write queued ones within the time limit, and end the thread."""
        self._stopping = True
        if self._thread is None:
            while self.run():
                pass
            return
        self._enqueue(lambda: None, _END)
        self._thread.join(timeout_s)
        self._late = True
        self._thread.join()

    def _enqueue(self, work: Callable[[], object], priority: int = _TASK) -> None:
        self._work.put((priority, next(self._numbers), work))

    def _loop(self) -> None:
        priority = _TASK
        while priority != _END:
            priority, _, work = self._work.get()
            try:
                work()
            except Exception:
                _log.exception("the disk tier failed at one piece of work")

    def _store(self, offered: tuple[TierBlock, Row], saved_until_s: float | None, life: int) -> None:
        block, row = offered
        counts = self.tier.index.counts
        try:
            if not self._late and self.tier.store(block, row, saved_until_s, life=life):
                counts.stores += 1
            else:
                counts.drops += 1
        finally:
            if self._pending.get(block.block_hash) is offered:
                del self._pending[block.block_hash]
        self._wake()

    def _read(self, load: DiskLoad) -> None:
        started_s = time.perf_counter()
        try:
            for block_hash in load.hashes:
                block = self._pending.get(block_hash) or self.tier.load(block_hash)
                if block is None:
                    break
                load.blocks[block_hash] = block
            self.tier.touch(reversed(list(load.blocks)))
        finally:
            load.duration_s = time.perf_counter() - started_s
            load.done = True
            self._wake()
