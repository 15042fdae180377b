"""Loads evicted blocks from the tiers back into the engine's pool before a prefill.

Called by the loop alone, except ``samples``. A block is loaded only if its prefix digest equals the request's.

``TierSpiller`` writes: it is notified of every eviction and of every pin's end, from its creation to ``close``.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from time import perf_counter
from typing import NamedTuple

from router.protocol.block_hash import HASH_BYTES, hash_at
from router.protocol.samples import Labels, Sample
from serve_app.cache.kv_chain import Row
from serve_app.cache.prefix.blocks import CachedBlock
from serve_app.cache.prefix.hot_prefixes import HashedTokens
from serve_app.cache.prefix.prefix_cache import PrefixCache
from serve_app.cache.prefix_digest import TierBlock, next_digest, scope_digest
from serve_app.cache.tiers.tier import ReadRows, Tier, TierLoad, Wanted
from serve_app.cache.tiers.tier_index import account_key
from serve_app.cache.tiers.tiers import Tiers
from serve_app.config.cache import CacheSection
from serve_app.engine.protocol import Clock, EngineRequest
from serve_app.engine.reports import EngineMeters
from serve_app.engine.scheduling.scheduler import Fetched
from serve_app.engine.scheduling.sequence import SequenceState
from serve_app.engine.settings import EngineSettings
from serve_app.engine.step import Runner

CLOSE_S = 5.0
"""How long a stopping engine may write blocks that exist only in memory to tiers that keep them."""

CLOSE_BLOCKS = 64


@dataclass(eq=False)
class TierSpiller:
    """Spills and saves of one engine. ``clock``: the cache's."""

    cache: PrefixCache
    runner: Runner
    tiers: Tiers
    clock: Callable[[], float]
    _noted_s: float = -math.inf

    def __post_init__(self) -> None:
        if self.tiers.tiers:
            self.cache.on_evict = self.spill
            self.cache.pins.on_end = self.end_save

    def note_activity(self) -> None:
        """Give the tenants that the pool has seen since the last call their shares of the tiers."""
        if not self.tiers.indexes:
            return
        now_s = self.clock()
        self.tiers.seen(self.cache.quota.seen_since(self._noted_s))
        self._noted_s = now_s

    def spill(self, evicted: Sequence[CachedBlock]) -> None:
        """Spill blocks evicted from the pool, children first."""
        self.note_activity()
        self.tiers.spill(describe(self.cache, evicted), self._reader(evicted))

    def save(self, entries: Sequence[CachedBlock], ttl_s: float | None) -> bool:
        """Save pool blocks, children first, below for ``ttl_s`` (None: forever); False if some were not written."""
        until_s = math.inf if ttl_s is None else float(math.floor(time.time() + ttl_s))
        return self.tiers.save(describe(self.cache, entries), self._reader(entries), until_s)

    def end_save(self, blocks: Sequence[int]) -> None:
        """End a save: its blocks below the pool can be evicted like others."""
        entries = map(self.cache.index.of_block, blocks)
        self.tiers.end_save([entry.block_hash for entry in entries if entry is not None])

    def close(self) -> None:
        """Write pool and tiers to those that keep, if there are any; saves keep their remaining time."""
        cache, tiers = self.cache, self.tiers
        if not tiers.tiers:
            return
        cache.expire_pins()
        cache.pins.on_end = None
        deadline_s = time.monotonic() + CLOSE_S
        for pin in cache.pins.soonest_first():  # a block under several pins gets the last one's end
            tiers.wait_for_room(len(pin.blocks), deadline_s)
            entries = map(cache.index.of_block, reversed(pin.blocks))
            left_s = None if pin.expires_s == math.inf else pin.expires_s - self.clock()
            self.save([entry for entry in entries if entry is not None], left_s)
            cache.unpin(pin.key)
        while tiers.keeping and cache.pool.idle_blocks:
            tiers.wait_for_room(CLOSE_BLOCKS, deadline_s)
            cache.evict(min(CLOSE_BLOCKS, cache.pool.idle_blocks))
        cache.on_evict = None
        tiers.close(deadline_s)

    def _reader(self, entries: Sequence[CachedBlock]) -> ReadRows:
        return lambda indices, rows: self.runner.read_blocks([entries[i].block for i in indices], rows)


def describe(cache: PrefixCache, entries: Sequence[CachedBlock]) -> list[TierBlock]:
    """Return the tiers' descriptions of pool blocks; a parent is in ``entries`` or still in the cache."""
    batch = {entry.block: entry for entry in entries}
    described = []
    for entry in entries:
        unknown: list[CachedBlock] = []
        above: CachedBlock | None = entry
        while above is not None and not above.prefix_digest:
            unknown.append(above)
            parent = above.parent
            above = None if parent is None else batch.get(parent) or cache.index.of_block(parent)
        digest = above.prefix_digest if above is not None else b""
        for block in reversed(unknown):
            digest = block.prefix_digest = next_digest(digest, scope_digest(block.scope), block.token_bytes)
        scope, owner = entry.scope, account_key(entry.tenant)
        described.append(
            TierBlock(entry.block_hash, entry.prefix_digest, scope_digest(scope), scope.lora, entry.token_bytes, owner)
        )
    return described


STEP_BYTES = 64 * 1024 * 1024
"""Upper limit of the bytes copied into the pool between two steps: about ten milliseconds of memcpy."""

LOADING_BYTES = 512 * 1024 * 1024
"""Upper limit of the bytes read from tiers and not yet in the pool; loads beyond it wait."""

MOST_LOADS = 64
"""Limit of loads for one request, as its loaded blocks may be evicted again before its admission."""

Rows = Callable[[], Sequence[Row]]
"""Called once blocks are allocated: returns the rows left, in order, as an eviction may have moved some."""


@dataclass(slots=True)
class _Fetch:
    """The state of one request's loads. ``load``: the one it waits for."""

    load: TierLoad | None = None
    worthwhile: dict[Tier, bool] = field(default_factory=dict)
    loads: int = 0


class _Found(NamedTuple):
    """A block that continues a prefix, and its tier. ``row``: its bytes, None if it must be loaded from there."""

    wanted: Wanted
    tier: Tier
    row: Row | None


class TierLoader:
    """Loads and waits of one engine; ``spiller``: writes to the tiers; ``wake``: called when a tier has news."""

    def __init__(
        self,
        settings: EngineSettings,
        cache: PrefixCache,
        runner: Runner,
        meters: EngineMeters,
        wake: Callable[[], None],
        clock: Clock,
    ) -> None:
        below = settings.tiers if settings.enable_prefix_caching else CacheSection()
        shares = settings.tenant_shares
        self.tiers = Tiers(below, runner.kv_format, runner.block_bytes, wake, shares=shares, clock=clock)
        self.spiller = TierSpiller(cache, runner, self.tiers, clock)
        self._cache = cache
        self._runner = runner
        self._meters = meters
        self._fetches: dict[str, _Fetch] = {}
        self._step_blocks = max(1, STEP_BYTES // runner.block_bytes)
        self._room_blocks = self._step_blocks

    @property
    def loading(self) -> int:
        """Number of waiting requests that cannot start before their load is done."""
        return sum(1 for fetch in self._fetches.values() if fetch.load is not None and not fetch.load.done)

    def begin_step(self) -> None:
        """Allow another step's worth of copying, and note the tenants active since the last step."""
        self.spiller.note_activity()
        self._room_blocks = self._step_blocks

    def learn(self, request: EngineRequest) -> None:
        """Tell the tiers the roots of a request's scopes."""
        if self.tiers.tiers and request.root:
            scope, root = request.scope, request.root
            self.tiers.learn(scope_digest(scope.private), root[-HASH_BYTES:])
            if scope.public_blocks:
                self.tiers.learn(scope_digest(scope.public), root[:HASH_BYTES])

    def forget(self, request_id: str) -> None:
        """Drop the state of a request that ended."""
        self._fetches.pop(request_id, None)

    def fetch(self, sequence: SequenceState, matched: Sequence[int]) -> Fetched:
        """Load the blocks that continue ``matched``; the pool must have space for the sequence."""
        if not self.tiers.tiers:
            return "nothing"
        fetch = self._fetches.get(sequence.request.request_id)
        load = fetch.load if fetch is not None else None
        if load is not None and not load.done:
            return "wait"
        run = self._run(sequence, matched, load)
        if fetch is None:
            if not run:
                return "nothing"
            fetch = self._fetches[sequence.request.request_id] = _Fetch()
        fetch.load = None
        if load is not None and not load.observed:
            load.observed = True
            load.tier.loaded(len(load.blocks), load.duration_s)
        if not run or fetch.loads >= MOST_LOADS or not self._worthwhile(fetch, run):
            return "nothing"
        if run[0].row is None:
            return self._await(fetch, run)
        # Loaded blocks that do not fit this step stay with the request.
        fetch.load = load
        if self._room_blocks <= 0:
            return "wait"
        fetch.loads += 1
        return "loaded" if self._install(sequence, matched, run) else "nothing"

    def rows(self, tokens: HashedTokens, matched: Sequence[int], first: int, last: int) -> list[Row]:
        """Return the rows of blocks ``first`` to ``last`` - 1 that need no load, up to the first missing one.

        ``matched``: the chain's blocks in the pool; all later ones must be in such tiers, with the chain's digest. The
        rows are views, valid until the next spill.
        """
        rows: list[Row] = []
        hashes: list[bytes] = []
        expected = self._expected(tokens, matched, last) if self.tiers.tiers else ()
        for i, block in enumerate(expected, len(matched)):
            row = self.tiers.row(block)
            if row is None:
                break
            hashes.append(block.block_hash)
            if i >= first:
                rows.append(row)
        self.tiers.use(hashes)
        return rows

    def samples(self, labels: Labels) -> Iterable[Sample]:
        """Return the tiers' gauges, counters and load times (any thread)."""
        return self.tiers.samples(labels)

    def _run(self, sequence: SequenceState, matched: Sequence[int], load: TierLoad | None) -> list[_Found]:
        """Return the verified blocks that continue ``matched``; ``load``: one that is done."""
        limit = self._cache.reusable_blocks(sequence.prefill_tokens)
        blocks: list[_Found] = []
        for block in self._expected(sequence.hashed_tokens, matched, limit):
            tier = self.tiers.holder(block)
            row = tier.row(block.block_hash) if tier is not None else None
            if row is None and load is not None and (loaded := load.blocks.get(block.block_hash)) is not None:
                if loaded[0].prefix_digest != block.prefix_digest:
                    break
                tier, row = load.tier, loaded[1]
            if tier is None:
                break
            blocks.append(_Found(block, tier, row))
        return blocks

    def _expected(self, tokens: HashedTokens, matched: Sequence[int], last: int) -> Iterator[Wanted]:
        """Yield each block after the ``matched`` ones, up to ``last`` - 1."""
        size, parent = self._cache.block_size, b""
        if matched:
            entry = self._cache.index.of_block(matched[-1])
            assert entry is not None
            parent = describe(self._cache, [entry])[0].prefix_digest
        scopes = scope_digest(tokens.scope.public), scope_digest(tokens.scope.private)
        for i in range(len(matched), last):
            ids = tokens.token_ids[size * i : size * (i + 1)].astype("<i4", copy=False)
            scope = scopes[i >= tokens.scope.public_blocks]
            parent = next_digest(parent, scope, ids.tobytes())
            yield Wanted(hash_at(tokens.chain, i), parent, scope)

    def _worthwhile(self, fetch: _Fetch, run: Sequence[_Found]) -> bool:
        """Decide once per request and tier, so that it never waits for a load and then computes the blocks anyway.

        A block in a faster tier is then not computed because others, or what another tier may hold, load slowly.
        """
        tier = run[0].tier
        if tier not in fetch.worthwhile:
            blocks = sum(1 for hit in run if hit.tier is tier)
            size, tokens = blocks * self.tiers.size_bytes, blocks * self._cache.block_size
            fetch.worthwhile[tier] = tier.rule.worthwhile(size, tokens, self._meters.prefill_tokens_per_s)
        return fetch.worthwhile[tier]

    def _await(self, fetch: _Fetch, run: Sequence[_Found]) -> Fetched:
        tier = run[0].tier
        blocks_there = [hit.wanted for hit in run if hit.tier is tier and hit.row is None]
        waited_for = [f.load for f in self._fetches.values() if f.load is not None and not f.load.done]
        under_way = list(dict.fromkeys(waited_for))
        joined = next((load for load in under_way if blocks_there[0].block_hash in load.names), None)
        if joined is None:
            taken = sum(len(load.wanted) for load in under_way)
            room = LOADING_BYTES // self.tiers.size_bytes - taken
            if room <= 0 and under_way:
                fetch.load = under_way[0]  # the request asks again once there may be space
                return "wait"
            joined = tier.load(blocks_there[: max(1, room)])
        fetch.load = joined
        fetch.loads += 1
        return "wait"

    def _install(self, sequence: SequenceState, matched: Sequence[int], run: Sequence[_Found]) -> int:
        ready = list(takewhile(lambda hit: hit.row is not None, run))[: self._room_blocks]
        loaded_before = {hit.wanted.block_hash: hit.row for hit in ready if self.tiers.row(hit.wanted) is None}
        self.tiers.use([hit.wanted.block_hash for hit in ready])

        def rows() -> list[Row]:
            current = (
                loaded_before.get(hit.wanted.block_hash, self.tiers.row(hit.wanted)) for hit in ready
            )  # an eviction may have moved some
            return [row for row in takewhile(lambda row: row is not None, current) if row is not None]

        started_s = perf_counter()
        loaded = install_blocks(self._cache, self._runner, sequence.hashed_tokens, matched, len(ready), rows)
        duration_s = perf_counter() - started_s
        self._room_blocks -= loaded
        for hit in ready[:loaded]:
            hit.tier.counts.hits += 1
        if loaded and not loaded_before:
            ready[0].tier.loaded(loaded, duration_s)
        return loaded


def install_blocks(
    cache: PrefixCache, runner: Runner, tokens: HashedTokens, matched: Sequence[int], count: int, rows: Rows
) -> int:
    """Load up to ``count`` blocks after the ``matched`` ones of a chain; return how many more a match now finds.

    They are published like computed blocks, and no half-written block can be hit. The caller has ensured that ``count``
    blocks are available besides matched and reserved ones. Loaded blocks are idle afterwards, and evicted last among
    their tenant's.
    """
    cache.acquire(matched, read=False)
    fresh: list[int] = []
    try:
        fresh = cache.allocate(count, tokens.tenant)
        loaded = rows()
        runner.write_blocks(fresh[: len(loaded)], loaded)
        blocks = [*matched, *fresh]
        first, last = len(matched), len(matched) + len(loaded)
        done = cache.publish(tokens.scope, tokens.token_ids, tokens.chain, blocks, first, last)
        fresh = blocks[len(matched) :]
        return done - len(matched)
    finally:
        cache.release([*matched, *fresh])
