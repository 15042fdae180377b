"""Writes the blocks of vLLM's pool to the tiers below it, in a thread: vLLM evicts without a call, so ahead of that.

The pool's events tell of new blocks. Each is offered to the tiers once, and again after a while if it is used, so that
they keep what is used. The end of a prefix goes first, as the pool evicts it first. While requests run, copies take a
small part of the time, and more of it the more blocks wait; the blocks of a growing answer go several at once.
"""

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from router.protocol.block_hash import HASH_BYTES, PrefixScope, hash_at, split_chain
from router.vllm_events.batches import HeldBlock
from router.vllm_events.pool import FollowedPool
from serve_app.cache.kv_chain import Row
from serve_app.cache.prefix.hot_prefixes import HashedTokens
from serve_app.cache.prefix_digest import TierBlock, next_digest, scope_digest
from serve_app.cache.tiers.tier import Wanted
from serve_app.cache.tiers.tier_index import account_key
from serve_app.cache.tiers.tiers import Tiers
from serve_app.engine.protocol import Clock, EngineError
from serve_app.engine.vllm.transfer.migration import VllmMigration

_log = logging.getLogger(__name__)

COPY_BYTES = 16 << 20
"""Most bytes that leave the pool in one step."""

LEAST_PART = 0.1
"""The least part of the time for copies while requests run; all of it once a quarter of the pool waits."""

MOST_PAUSE_S = 0.25

TOGETHER = 8
QUIET_S = 2.0
"""While requests run, a prefix waits until so many new blocks are behind it, until it does not grow for this long, or
until an eighth of the pool is new."""

SAVE_S = 5.0
"""How long the pool's events may take to tell of a saved prefix."""

AGAIN_S = 60.0
"""A block in use is marked as used in the tiers this often. The order of use there is exact up to it."""

_TRIES = 3

ROOM_S = 5.0
"""How long a copy waits until slow tiers have space; after that they drop the ends of prefixes."""

CLOSE_S = 5.0
"""How long a stopping engine may write what waits."""


class _Gone(Exception):
    """Blocks left the pool before they were copied."""


class _Offered(NamedTuple):
    """A block that was offered. ``scope``: its own."""

    at_s: float
    digest: bytes
    scope: PrefixScope
    tenant: str


class _Waiting(NamedTuple):
    """A prefix that waits: its new blocks, when it grew, and the number of all blocks that had entered the pool."""

    blocks: int
    at_s: float
    entered: int


@dataclass(eq=False)
class TierWriter:
    """One engine's. ``copy_blocks``: the most in one step; ``busy``: whether requests run; ``send``: tells tiers' news.

    ``changed``: notified when a tier has some, or requests end. All but ``close`` and ``forget`` return at once.
    """

    tiers: Tiers
    pool: FollowedPool
    transfer: VllmMigration
    num_blocks: int
    copy_blocks: int
    busy: Callable[[], bool]
    send: Callable[[], None]
    changed: threading.Condition
    clock: Clock = time.monotonic
    _writing: threading.Lock = field(default_factory=threading.Lock)
    """Held while blocks are copied and offered, so that a reset leaves none behind."""
    _tips: OrderedDict[bytes, _Waiting] = field(default_factory=OrderedDict)
    """Prefixes by their last blocks, the longest unchanged first."""
    _saves: OrderedDict[bytes, tuple[float, float]] = field(default_factory=OrderedDict)
    """Saved prefixes by their last blocks: the expiry, and how long to wait for events."""
    _entered: int = 0
    _offered: OrderedDict[bytes, _Offered] = field(default_factory=OrderedDict)
    _at_work: bool = False
    _life: int = 0
    """The number of resets."""
    _closing_s: float | None = None
    _thread: threading.Thread | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing waits, and nothing is being copied (any thread)."""
        with self.changed:
            return not (self._tips or self._saves or self._at_work)

    def start(self) -> None:
        """Begin to write."""
        self._thread = threading.Thread(target=self._run, name="vllm-tier-writer", daemon=True)
        self._thread.start()

    def stored(self, hashes: bytes) -> None:
        """Note blocks that entered the pool (packed), parents first."""
        with self.changed:
            for block in split_chain(hashes):
                held = self.pool.get(block)
                if held is not None:
                    self._entered += 1
                    above = self._tips.pop(held.under, None)
                    blocks, entered = (above.blocks, above.entered) if above else (0, self._entered)
                    self._tips[block] = _Waiting(blocks + 1, self.clock(), entered)
            while len(self._tips) > self.num_blocks:  # the oldest ones have left the pool
                self._tips.popitem(last=False)
            self.changed.notify_all()

    def used(self, chain: bytes, blocks: int) -> None:
        """Note that a request used the first ``blocks`` of its chain in the pool."""
        tip = hash_at(chain, blocks - 1) if blocks else b""
        if tip in self._offered and self._lately(tip) is None:  # others wait already
            self.stored(tip)

    def save(self, chain: bytes, ttl_s: float | None) -> None:
        """Keep a prefix of the pool (packed hashes) as a saved one in the tiers, for ``ttl_s`` (None: forever)."""
        with self.changed:
            self._saves[chain[-HASH_BYTES:]] = saved_until_s(ttl_s), self.clock() + SAVE_S
            self.changed.notify_all()

    def lost(self, hashes: Iterable[bytes]) -> None:
        """Note that the tiers did not have blocks: they are offered anew once they are in the pool."""
        for block in hashes:
            self._offered.pop(block, None)

    def forget(self) -> None:
        """Drop what waits; afterwards nothing from before is offered."""
        with self._writing, self.changed:
            self._life += 1
            self._tips.clear()
            self._saves.clear()
            self._offered.clear()

    def close(self) -> None:
        """Write what waits, for at most about ``CLOSE_S``, and end the thread."""
        with self.changed:
            self._closing_s = self.clock() + CLOSE_S
            self.changed.notify_all()
        if self._thread is not None:
            self._thread.join(2 * CLOSE_S)

    def _run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(self._has_work, QUIET_S if self._tips or self._saves else None)
                life, (tip, until_s) = self._life, self._take()
                self._at_work = bool(tip)
            try:
                self.send()
                if not tip and self._closing_s is not None:
                    return
                if tip:
                    self._write(tip, until_s, life)
            except EngineError as error:
                _log.warning("blocks of the pool were not written to the tiers below: %s", error)
            except Exception:
                _log.exception("blocks of the pool were not written to the tiers below")
            self._at_work = False

    def _has_work(self) -> bool:
        return bool(self._next() or self.tiers.has_news or self._closing_s is not None)

    def _next(self) -> bytes:
        """Return the last block of the next prefix; b"" if none is due."""
        now_s = self.clock()
        if self._closing_s is not None and now_s > self._closing_s:
            return b""
        saved = (tip for tip, (_, late_s) in self._saves.items() if now_s > late_s or self.pool.get(tip) is not None)
        all_due = self._closing_s is not None or not self.busy()
        due = (tip for tip, waiting in self._tips.items() if all_due or self._due(waiting, now_s))
        return next(saved, b"") or next(due, b"")

    def _due(self, waiting: _Waiting, now_s: float) -> bool:
        quiet = now_s - waiting.at_s >= QUIET_S
        return quiet or waiting.blocks >= TOGETHER or 8 * (self._entered - waiting.entered) >= self.num_blocks

    def _take(self) -> tuple[bytes, float | None]:
        """Return the last block of the next prefix, and the expiry of its save; b"" if none is due."""
        tip = self._next()
        saved = self._saves.pop(tip, None)
        if saved is not None and self.pool.get(tip) is None:
            _log.info("a saved prompt is not in the tiers: it left the pool")
        if saved is None:
            self._tips.pop(tip, None)
        return tip, None if saved is None else saved[0]

    def _write(self, tip: bytes, until_s: float | None, life: int) -> None:
        """Offer a prefix, piece by piece, its end first."""
        blocks = self._describe(tip, whole=until_s is not None)
        while blocks:
            piece, blocks = blocks[-self.copy_blocks :], blocks[: -self.copy_blocks]
            self.tiers.tiers[0].wait_for_room(len(piece), time.monotonic() + ROOM_S)
            began_s = self.clock()
            with self._writing:
                if life != self._life or (self._closing_s is not None and began_s > self._closing_s):
                    return
                copied = self._offer(piece, until_s)
            if copied and self._closing_s is None:
                self.send()
                time.sleep(self._pause_s(self.clock() - began_s))

    def _offer(self, piece: list[tuple[TierBlock, _Offered]], until_s: float | None) -> bool:
        """Offer blocks of one prefix, parents first; return whether any were copied from the pool."""
        copied = False

        def read(blocks: list[TierBlock], indices: Sequence[int], rows: Sequence[Row]) -> None:
            nonlocal copied
            copied = True
            self._copy(blocks, indices, rows)

        for _ in range(_TRIES):
            blocks = [block for block, _ in piece[::-1]]
            try:
                if until_s is None:
                    self.tiers.spill(blocks, partial(read, blocks))
                else:
                    self.tiers.save(blocks, partial(read, blocks), until_s)
            except _Gone:
                held = list(takewhile(lambda one: self.pool.get(one[0].block_hash) is not None, piece))
                piece = held if len(held) < len(piece) else piece[:-1]  # its events come, or it ends a longest prompt
                continue
            for block, offered in piece:
                self._offered.pop(block.block_hash, None)
                self._offered[block.block_hash] = offered
            while len(self._offered) > 2 * self.num_blocks:
                self._offered.popitem(last=False)
            break
        return copied

    def _copy(self, blocks: Sequence[TierBlock], indices: Sequence[int], rows: Sequence[Row]) -> None:
        """Copy the blocks at these indices, children first, of one prefix into rows. Raises _Gone or EngineError."""
        low, high = min(indices), max(indices)
        prefix = self._prefix(blocks[low].block_hash)
        if prefix is None:
            raise _Gone
        count = high - low + 1
        first = len(prefix.chain) // HASH_BYTES - count
        part = self.transfer.export_prefix(prefix, first, count)
        if part is None or part.header.blocks < count:
            raise _Gone
        for index, row in zip(indices, rows, strict=True):
            row[:] = part.payload[high - index]

    def _describe(self, tip: bytes, *, whole: bool) -> list[tuple[TierBlock, _Offered]]:
        """Return a prefix's blocks behind the last one that was offered lately, all if ``whole``; [] if some are gone.

        Parents come first.
        """
        above, found = self._path(tip, whole=whole)
        described: list[tuple[TierBlock, _Offered]] = []
        for block, held in found:
            owner = self.transfer.owner_of(held.root) if held.root else above and (above.scope, above.tenant)
            if owner is None:
                return []
            scope, tenant = owner
            digest = next_digest(above.digest if above else b"", scope_digest(scope), held.token_bytes)
            if held.root:
                self.tiers.learn(scope_digest(scope), held.root)
            above = _Offered(self.clock(), digest, scope, tenant)
            key = account_key(tenant)
            described.append((TierBlock(block, digest, scope_digest(scope), scope.lora, held.token_bytes, key), above))
        return described

    def _prefix(self, tip: bytes) -> HashedTokens | None:
        """Return the whole prefix in the pool that ends with a block; None if some of it is gone."""
        _, blocks = self._path(tip, whole=True)
        if not blocks:
            return None
        begins = [index for index, (_, held) in enumerate(blocks) if held.root]
        owner = self.transfer.owner_of(blocks[begins[-1]][1].root)
        if owner is None:
            return None
        scope, tenant = owner
        ids = np.frombuffer(b"".join(held.token_bytes for _, held in blocks), "<i4")
        return HashedTokens(
            replace(scope, public_blocks=begins[-1]), ids, b"".join(block for block, _ in blocks), tenant
        )

    def _path(self, tip: bytes, *, whole: bool) -> tuple[_Offered | None, list[tuple[bytes, HeldBlock]]]:
        """Return the last block of a prefix that was offered lately, and those behind it, parents first.

        ``whole``: None, and all blocks. No blocks if some are gone.
        """
        found: list[tuple[bytes, HeldBlock]] = []
        block, above = tip, None
        while whole or (above := self._lately(block)) is None:
            held = self.pool.get(block)
            if held is None:
                return None, []
            found.append((block, held))
            if held.root == held.under:
                break
            block = held.under
        return above, found[::-1]

    def _lately(self, block: bytes) -> _Offered | None:
        """Return what is known of a block that was offered not long ago, and that the first tier has not evicted."""
        offered = self._offered.get(block)
        if offered is None or self.clock() - offered.at_s > AGAIN_S:
            return None
        named = Wanted(block, offered.digest, scope_digest(offered.scope))
        return offered if self.tiers.tiers[0].holds(named) else None

    def _pause_s(self, took_s: float) -> float:
        """Return how long to copy nothing after a copy."""
        part = max(LEAST_PART, 4 * len(self._tips) / self.num_blocks)
        return min(MOST_PAUSE_S, max(0.0, took_s * (1 / part - 1))) if self.busy() else 0.0


def saved_until_s(ttl_s: float | None) -> float:
    """Return the Unix time at which a save ends."""
    return math.inf if ttl_s is None else float(math.floor(time.time() + ttl_s))
