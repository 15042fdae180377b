"""The thread between an engine's loop and its disk tier.

Owns the bounded queue of writes and the loads in progress. Loads go before writes; a block that still waits to be
written is loaded from memory; a write that finds the queue full is dropped, never waited for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from serve_app.cache.kv_chain import Row
from serve_app.cache.prefix_digest import TierBlock
from serve_app.cache.tiers.disk import DiskTier

_log = logging.getLogger(__name__)

Wake = Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Task:
    work: Callable[[], object]
    must_run: bool = False


class DiskLoad:
    """Blocks on their way up, children last. ``blocks`` may be read once ``done``: the longest readable run."""

    def __init__(self, hashes: Sequence[bytes]) -> None:
        self.hashes = tuple(hashes)
        self.wanted = frozenset(hashes)
        self.blocks: dict[bytes, tuple[TierBlock, Row]] = {}
        self.duration_s = 0.0
        self.observed = False
        self.done = False


class DiskQueue:
    """Work for one disk tier. ``wake`` is called from its thread when a load is done or the tier has events.

    ``block_bytes``: what a block counts against ``max_bytes``. Without ``start`` nothing happens until ``run``.
    """

    def __init__(self, tier: DiskTier, max_bytes: int, block_bytes: int, wake: Wake) -> None:
        self.tier = tier
        self.dropped_blocks = 0
        self.stored_blocks = 0
        self._max_blocks = max(1, max_bytes // block_bytes)
        self._wake = wake
        self._changed = threading.Condition()
        self._loads: deque[DiskLoad] = deque()
        self._tasks: deque[_Task] = deque()
        self._pending: dict[bytes, tuple[TierBlock, Row]] = {}
        self._stopping = False
        self._thread: threading.Thread | None = None

    @property
    def pending_blocks(self) -> int:
        """Blocks that wait to be written."""
        return len(self._pending)

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._loop, name="warmpath-disk-tier", daemon=True)
        self._thread.start()

    def find(self, block_hash: bytes) -> TierBlock | None:
        """Return what is known of a block that is filed or waits to be."""
        pending = self._pending.get(block_hash)
        return pending[0] if pending else self.tier.get(block_hash)

    def room(self) -> int:
        """Return how many blocks may be offered now."""
        return self._max_blocks - len(self._pending)

    def offer(self, block: TierBlock, row: Row, saved_until_s: float | None = None) -> bool:
        """Queue a block to be written; ``row`` is the queue's from now on. False, and counted, when it is full."""
        with self._changed:
            if self._stopping or self.room() <= 0:
                self.dropped_blocks += 1
                return False
            self._pending[block.block_hash] = (block, row)
            life = self.tier.life
            self._tasks.append(_Task(lambda: self._store(block, row, saved_until_s, life)))
            self._changed.notify_all()
        return True

    def load(self, hashes: Sequence[bytes]) -> DiskLoad:
        """Start reading blocks of one prefix, parents first."""
        load = DiskLoad(hashes)
        with self._changed:
            self._loads.append(load)
            self._changed.notify_all()
        return load

    def touch(self, hashes: Iterable[bytes]) -> None:
        """Note a use of filed blocks, children before parents."""
        wanted = list(hashes)
        self._enqueue(lambda: self.tier.touch(wanted))

    def mark(self, hashes: Iterable[bytes], saved_until_s: float | None) -> None:
        """Note until when blocks are saved, those offered before included; None: no more."""
        wanted = list(hashes)
        self._enqueue(lambda: self.tier.mark(wanted, saved_until_s))

    def clear(self) -> None:
        """Forget every block, filed or waiting."""
        with self._changed:
            self._pending.clear()
            self._drop_tasks()
            self._tasks.append(_Task(self.tier.forget_all(), must_run=True))
            self._changed.notify_all()

    def run(self) -> bool:
        """Do one piece of work, loads first; False when there is none."""
        with self._changed:
            load = self._loads.popleft() if self._loads else None
            task = self._tasks.popleft() if load is None and self._tasks else None
        if load is not None:
            try:
                self._read(load)
            finally:
                self._wake()
        elif task is not None:
            task.work()
        return load is not None or task is not None

    def stop(self, timeout_s: float) -> bool:
        """Take nothing more, finish what is queued, end the thread; False when the time did not do for all."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is None:
            while self.run():
                pass
        else:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                with self._changed:
                    self.dropped_blocks += len(self._pending)
                    self._drop_tasks()
                self._thread.join()
                return False
        return True

    def _enqueue(self, task: Callable[[], object]) -> None:
        with self._changed:
            self._tasks.append(_Task(task))
            self._changed.notify_all()

    def _drop_tasks(self) -> None:
        """Forget what need not happen; files of a reset cache must go. The lock is held."""
        kept = [task for task in self._tasks if task.must_run]
        self._tasks.clear()
        self._tasks.extend(kept)

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not (self._loads or self._tasks or self._stopping):
                    self._changed.wait()
                if self._stopping and not (self._loads or self._tasks):
                    return
            try:
                self.run()
            except Exception:
                _log.exception("the disk tier failed at one piece of work")

    def _store(self, block: TierBlock, row: Row, saved_until_s: float | None, life: int) -> None:
        try:
            if self.tier.store(block, row, saved_until_s, life=life):
                self.stored_blocks += 1
            else:
                self.dropped_blocks += 1
        finally:
            with self._changed:
                self._pending.pop(block.block_hash, None)
        self._wake()

    def _read(self, load: DiskLoad) -> None:
        started_s = time.perf_counter()
        try:
            for block_hash in load.hashes:
                found = self._pending.get(block_hash) or self.tier.load(block_hash)
                if found is None:
                    break
                load.blocks[block_hash] = found
            self.tier.touch(reversed(list(load.blocks)))
        finally:
            load.duration_s = time.perf_counter() - started_s
            load.done = True
