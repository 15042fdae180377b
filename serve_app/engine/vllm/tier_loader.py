"""Loads from the tiers below vLLM's pool what a request lacks there, in threads, before vLLM computes the request.

A request waits for one load, of the blocks that continue its prefix in the pool, as long as that is faster than
computing them. Everything that arrives too late, wrong or not at all is computed.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

import numpy as np
from msgspec import structs

from router.protocol.block_hash import HASH_BYTES, common_blocks, count_leading, hash_at
from router.vllm_events.pool import FollowedPool
from serve_app.cache.kv_chain import KvChain, TransferError, make_header
from serve_app.cache.prefix.hot_prefixes import HashedTokens
from serve_app.cache.prefix_digest import extend_digests, scope_digest
from serve_app.cache.tiers.tier import Tier, TierLoad, Wanted
from serve_app.cache.tiers.tiers import Tiers
from serve_app.engine.protocol import Clock, EngineError, EngineRequest
from serve_app.engine.reports import EngineMeters
from serve_app.engine.vllm.transfer.migration import VllmMigration

_log = logging.getLogger(__name__)

PIECE_BYTES = 32 << 20
"""Bytes that enter the pool in one step."""

THREADS = 8
"""Loads at once. Each has at most two pieces in memory: one is read while the other enters the pool."""

STEPS = 2
"""The steps that a load takes besides its bytes."""

LEAST_DEADLINE_S = 1.0
UNKNOWN_DEADLINE_S = 5.0


@dataclass(eq=False)
class WaitedLoad:
    """A load of blocks ``first`` to ``last`` - 1 of a request's chain, or fewer. ``waiting``: requests that wait.

    ``known``: the leading blocks that the pool and the tiers' own lists hold; ``held``: those of the pool at the end.
    """

    request: EngineRequest
    first: int
    last: int
    known: int
    began_s: float
    held: int = 0
    waiting: int = 1
    left_bytes: int = 0
    ended: Future[None] = field(default_factory=Future)

    def __post_init__(self) -> None:
        """Let nobody who leaves cancel ``ended`` for others."""
        self.ended.set_running_or_notify_cancel()

    def held_of(self, request: EngineRequest) -> int:
        """Return how many of a request's leading blocks are then in the pool. Its events may tell of them later."""
        return min(self.held, common_blocks(self.request.block_hashes, request.block_hashes))


@dataclass(eq=False)
class PrefixLoader:
    """One engine's loads. ``changed``: notified when a tier has a result; ``lost``: told of blocks without."""

    tiers: Tiers
    pool: FollowedPool
    transfer: VllmMigration
    meters: EngineMeters
    block_size: int
    ratio: float
    changed: threading.Condition
    lost: Callable[[Iterable[bytes]], None]
    clock: Clock = time.monotonic
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Guards the loads and the tiers' rules."""
    _importing: threading.Lock = field(default_factory=threading.Lock)
    """Held while blocks enter the pool, so that none from before a reset does after it."""
    _loads: list[WaitedLoad] = field(default_factory=list)
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(THREADS, thread_name_prefix="vllm-tier-loader")
    )
    _life: int = 0
    """The number of resets."""
    _stopping: bool = False

    def begin(self, request: EngineRequest, after: int = 0) -> WaitedLoad | None:
        """Begin or join the load for a request, of which the pool holds at least ``after`` blocks; then call ``leave``.

        None if there is nothing to wait for.
        """
        tiers, chain = self.tiers, request.block_hashes
        if not tiers.tiers or not request.reads_kv:
            return None
        usable = (len(request.token_ids) - 1) // self.block_size
        held = max(after, self.pool.count_held(chain, usable))
        if held >= usable:
            return None
        # Without vLLM's host memory: blocks enter the pool behind others there.
        first = max(after, count_leading(chain, usable, lambda block: self.pool.get(block) is not None))
        known = first
        while known < usable and any(hash_at(chain, known) in index for index in tiers.indexes.values()):
            known += 1
        if known <= held and len(tiers.indexes) == len(tiers.tiers):
            return None
        with self._lock:
            if self._stopping:
                return None
            for load in self._loads:
                common = min(common_blocks(load.request.block_hashes, chain), load.last)
                if common > first and load.first <= first:
                    load.waiting += 1
                    return load
            load = WaitedLoad(request, first, usable, known, self.clock())
            self._loads.append(load)
            self._threads.submit(self._run, load, self._life)
        return load

    def leave(self, load: WaitedLoad) -> None:
        """Wait no longer."""
        with self._lock:
            load.waiting -= 1

    def forget(self) -> None:
        """Let no load that has begun bring more into the pool."""
        with self._importing:
            self._life += 1

    def close(self) -> None:
        """End all loads."""
        with self._lock:
            self._stopping = True
        with self.changed:
            self.changed.notify_all()
        self._threads.shutdown(cancel_futures=True)
        for load in self._loads:
            load.ended.set_result(None)

    def _run(self, load: WaitedLoad, life: int) -> None:
        try:
            self._load(load, life)
        except (TransferError, EngineError) as error:
            _log.warning("blocks of a tier were not loaded: %s", error)
        except Exception:
            _log.exception("a load from a tier failed")
        finally:
            with self._lock:
                self._loads.remove(load)
                load.left_bytes = 0
            load.ended.set_result(None)

    def _load(self, load: WaitedLoad, life: int) -> None:
        at, most_s = load.first, 0.0
        for tier, group in groupby(self._found(load), itemgetter(0)):
            blocks = [wanted for _, wanted in group]
            compute_s = self._worthwhile(load, tier, blocks)
            if compute_s is None:
                return
            most_s += compute_s
            end_s = load.began_s + max(LEAST_DEADLINE_S, most_s)
            arrived = self._load_from(tier, load, blocks, at, end_s, life)
            at += arrived
            load.held = at
            if arrived < len(blocks):
                self.lost([wanted.block_hash for wanted in blocks[arrived:]])
                return

    def _found(self, load: WaitedLoad) -> list[tuple[Tier, Wanted]]:
        """Return the blocks that continue the request's prefix in the pool, each with its fastest tier."""
        request, size = load.request, self.block_size
        last = load.known if len(self.tiers.indexes) == len(self.tiers.tiers) else load.last
        digests = extend_digests(b"", request.scope, request.identity[: last * size], size)
        public, private = scope_digest(request.scope.public), scope_digest(request.scope.private)
        found: list[tuple[Tier, Wanted]] = []
        for index in range(load.first, last):
            scope = public if index < request.scope.public_blocks else private
            wanted = Wanted(hash_at(request.block_hashes, index), digests[index], scope)
            tier = self.tiers.holder(wanted)
            if tier is None:
                break
            found.append((tier, wanted))
        return found

    def _worthwhile(self, load: WaitedLoad, tier: Tier, blocks: Sequence[Wanted]) -> float | None:
        """Return how long the load may take, its wait for others included; None if computing is faster."""
        tokens, size_bytes = len(blocks) * self.block_size, len(blocks) * self.tiers.size_bytes
        rate = self.meters.prefill_tokens_per_s
        beside = round(STEPS * self.meters.decode_step_s * rate / self.ratio) if self.ratio else 0
        with self._lock:
            waits = sum(other.left_bytes for other in self._loads if other is not load)
            if not tier.rule.worthwhile(waits + size_bytes, max(0, tokens - beside), rate):
                return None
            load.left_bytes = size_bytes
        return self.ratio * tokens / rate if rate else UNKNOWN_DEADLINE_S

    def _load_from(
        self, tier: Tier, load: WaitedLoad, blocks: Sequence[Wanted], first: int, end_s: float, life: int
    ) -> int:
        """Load blocks ``first`` and following from one tier; return how many the pool then holds."""
        began_s, arrived, step = self.clock(), 0, max(1, PIECE_BYTES // self.tiers.size_bytes)
        pieces = [blocks[start : start + step] for start in range(0, len(blocks), step)]
        reading: TierLoad | None = tier.load(pieces[0])
        for number, piece in enumerate(pieces):
            assert reading is not None
            current = reading
            with self.changed:
                self.changed.wait_for(lambda: current.done or self._stopping, max(0.0, end_s - self.clock()))  # noqa: B023
            if not current.done or self._stopping or not load.waiting:
                break
            reading = tier.load(pieces[number + 1]) if number + 1 < len(pieces) else None
            moved = self._import(load.request, current, piece, first + arrived, life)
            arrived += moved
            with self._lock:
                load.left_bytes -= moved * self.tiers.size_bytes
            if moved < len(piece) or self.clock() > end_s:
                break
        took_s = self.clock() - began_s
        with self._lock:
            tier.counts.hits += arrived
            # Without the steps beside the bytes: else small loads would look like a slow tier.
            tier.loaded(arrived, took_s - min(STEPS * self.meters.decode_step_s, took_s / 2))
        return arrived

    def _import(self, request: EngineRequest, read: TierLoad, piece: Sequence[Wanted], first: int, life: int) -> int:
        """Move what was read of a piece into the pool; return how many more blocks of it the pool then holds."""
        rows = []
        for wanted in piece:
            block = read.blocks.get(wanted.block_hash)
            if block is None or block[0].prefix_digest != wanted.prefix_digest:
                break
            rows.append(block[1])
        kv_format = self.transfer.kv_format
        if not rows or kv_format is None:
            return 0
        end = first + len(rows)
        ids = np.ascontiguousarray(request.identity[: end * self.block_size], dtype=np.int32)
        chain, payload = request.block_hashes[: end * HASH_BYTES], np.stack(rows)
        header = make_header(kv_format, request.scope, ids, chain, payload, first)
        part = KvChain(structs.replace(header, root=request.root), payload)
        prefix = HashedTokens(request.scope, ids, chain, request.tenant)
        with self._importing:
            held = self.transfer.import_part(part, prefix, first) if life == self._life else first
        return max(0, min(held, end) - first)
