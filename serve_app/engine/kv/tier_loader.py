"""Loads evicted blocks from the tiers back into the engine's pool before a prefill.

Called by the loop alone, except ``samples``. A block is loaded only if its prefix digest equals the request's.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

from router.protocol.block_hash import hash_at
from router.protocol.samples import Histogram, Labels, Sample
from serve_app.cache.kv_chain import Row
from serve_app.cache.prefix.hot_prefixes import HashedTokens
from serve_app.cache.prefix.prefix_cache import PrefixCache
from serve_app.cache.prefix_digest import TierBlock, extend_digests
from serve_app.cache.tiers.disk_queue import DiskLoad
from serve_app.cache.tiers.load_rule import LoadRule
from serve_app.cache.tiers.tiers import Tiers, TierSettings
from serve_app.engine.kv.tier_spiller import TierSpiller, describe
from serve_app.engine.metrics import EngineMeters
from serve_app.engine.protocol import Clock
from serve_app.engine.scheduling.scheduler import Fetched
from serve_app.engine.scheduling.sequence import SequenceState
from serve_app.engine.settings import EngineSettings
from serve_app.engine.step import Runner

STEP_BYTES = 64 * 1024 * 1024
"""Upper limit of the bytes copied into the pool between two steps: about ten milliseconds of memcpy."""

LOADING_BYTES = 512 * 1024 * 1024
"""Upper limit of the bytes read from disk and not yet in the pool; loads beyond it wait."""

MOST_LOADS = 64
"""Limit of loads for one request, as its loaded blocks may be evicted again before its admission."""

_LOAD_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

Rows = Callable[[], Sequence[Row]]
"""Called once blocks are allocated: returns the rows left, in order, as an eviction may have moved some."""


@dataclass(slots=True)
class _Fetch:
    """The state of one request's loads. ``load``: the one it waits for."""

    load: DiskLoad | None = None
    worthwhile: bool | None = None
    loads: int = 0


class TierLoader:
    """Loads and waits of one engine; ``spiller``: writes to the tiers; ``wake``: called when the disk has news."""

    def __init__(
        self,
        settings: EngineSettings,
        cache: PrefixCache,
        runner: Runner,
        meters: EngineMeters,
        wake: Callable[[], None],
        clock: Clock,
    ) -> None:
        below = settings.tiers if settings.enable_prefix_caching else TierSettings()
        shares = settings.tenant_shares
        self.tiers = Tiers(below, runner.kv_format, runner.block_bytes, wake, shares=shares, clock=clock)
        bounds = {"host": below.host_bytes, "disk": below.disk_bytes}
        self._times = {tier: Histogram(_LOAD_BUCKETS_S) for tier, most_bytes in bounds.items() if most_bytes}
        self.spiller = TierSpiller(cache, runner, self.tiers, clock, enabled=bool(self._times))
        self._cache = cache
        self._runner = runner
        self._meters = meters
        self._rule = LoadRule(settings.tiers.load_ratio)
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

    def forget(self, request_id: str) -> None:
        """Drop the state of a request that ended."""
        self._fetches.pop(request_id, None)

    def fetch(self, sequence: SequenceState, matched: Sequence[int]) -> Fetched:
        """Load the blocks that continue ``matched``; the pool must have space for the sequence."""
        fetch = self._fetches.get(sequence.request.request_id)
        load = fetch.load if fetch is not None else None
        if load is not None and not load.done:
            return "wait"
        hits = len(matched)
        missing = hash_at(sequence.chain, hits)
        if load is None and self.tiers.find(missing) is None:
            return "nothing"
        if fetch is None:
            fetch = self._fetches[sequence.request.request_id] = _Fetch()
        fetch.load = None
        if load is not None and not load.observed:
            self._observe(load)
        staged = load.blocks if load is not None else {}
        run = self._run(sequence, matched, staged)
        if not run or fetch.loads >= MOST_LOADS or not self._worthwhile(fetch, run):
            return "nothing"
        if run[0][1] == "disk":
            return self._await_disk(fetch, run)
        # Blocks read from disk that do not fit this step stay with the request.
        fetch.load = load
        if self._room_blocks <= 0:
            return "wait"
        fetch.loads += 1
        return "loaded" if self._install(sequence, matched, run, staged) else "nothing"

    def host_rows(self, tokens: HashedTokens, matched: Sequence[int], first: int, last: int) -> list[Row]:
        """Return the rows of blocks ``first`` to ``last`` - 1 in host memory, up to the first missing one.

        ``matched``: the chain's blocks in the pool; all later ones must be in host memory, with the chain's digest.
        The rows are views, valid until the next spill.
        """
        rows: list[Row] = []
        hashes: list[bytes] = []
        expected = self._expected(tokens, matched, last) if "host" in self._times else ()
        for i, (block_hash, digest) in enumerate(expected, len(matched)):
            known, row = self.tiers.find(block_hash), self.tiers.row(block_hash)
            if known is None or row is None or known[0].prefix_digest != digest:
                break
            hashes.append(block_hash)
            if i >= first:
                rows.append(row)
        self.tiers.use(hashes)
        return rows

    def samples(self, labels: Labels) -> list[Sample]:
        """Return the tiers' gauges, counters and load times (any thread)."""
        samples = list(self.tiers.samples(labels))
        for tier, histogram in self._times.items():
            samples.extend(histogram.samples("warmpath_kv_tier_load_seconds", (*labels, ("tier", tier))))
        return samples

    def _run(
        self, sequence: SequenceState, matched: Sequence[int], staged: Mapping[bytes, tuple[TierBlock, Row]]
    ) -> list[tuple[TierBlock, str]]:
        """Return the verified blocks that continue ``matched``, each with its tier ("staged": read from disk)."""
        limit = self._cache.reusable_blocks(sequence.prefill_tokens)
        blocks: list[tuple[TierBlock, str]] = []
        for block_hash, digest in self._expected(sequence.hashed_tokens, matched, limit):
            known = self.tiers.find(block_hash)
            if block_hash in staged and (known is None or known[1] == "disk"):
                known = staged[block_hash][0], "staged"
            if known is None or known[0].prefix_digest != digest:
                break
            blocks.append(known)
        return blocks

    def _expected(self, tokens: HashedTokens, matched: Sequence[int], last: int) -> Iterator[tuple[bytes, bytes]]:
        """Yield the hash and required digest of each block after the ``matched`` ones, up to ``last`` - 1."""
        size, parent = self._cache.block_size, b""
        if matched:
            entry = self._cache.index.of_block(matched[-1])
            assert entry is not None
            parent = describe(self._cache, [entry])[0].prefix_digest
        for i in range(len(matched), last):
            ids = tokens.token_ids[size * i : size * (i + 1)]
            (parent,) = extend_digests(parent, tokens.scope.at(i), ids, size)
            yield hash_at(tokens.chain, i), parent

    def _worthwhile(self, fetch: _Fetch, run: Sequence[tuple[TierBlock, str]]) -> bool:
        """Decide once per request, so that it never waits for a load and then computes the blocks anyway."""
        if fetch.worthwhile is None:
            sizes: dict[str, int] = {}
            for _, tier in run:
                name = "host" if tier == "host" else "disk"
                sizes[name] = sizes.get(name, 0) + self.tiers.size_bytes
            tokens = len(run) * self._cache.block_size
            fetch.worthwhile = self._rule.worthwhile(sizes, tokens, self._meters.prefill_tokens_per_s)
        return fetch.worthwhile

    def _await_disk(self, fetch: _Fetch, run: Sequence[tuple[TierBlock, str]]) -> Fetched:
        hashes = [block.block_hash for block, tier in run if tier == "disk"]
        waited_for = [f.load for f in self._fetches.values() if f.load is not None and not f.load.done]
        under_way = list(dict.fromkeys(waited_for))
        joined = next((load for load in under_way if hashes[0] in load.wanted), None)
        if joined is None:
            taken = sum(len(load.hashes) for load in under_way)
            room = LOADING_BYTES // self.tiers.size_bytes - taken
            if room <= 0 and under_way:
                fetch.load = under_way[0]  # the request asks again once there may be space
                return "wait"
            joined = self.tiers.load(hashes[: max(1, room)])
        fetch.load = joined
        fetch.loads += 1
        return "wait"

    def _install(
        self,
        sequence: SequenceState,
        matched: Sequence[int],
        run: Sequence[tuple[TierBlock, str]],
        staged: Mapping[bytes, tuple[TierBlock, Row]],
    ) -> int:
        ready = next((i for i, (_, tier) in enumerate(run) if tier == "disk"), len(run))
        run = run[: min(ready, self._room_blocks)]
        self.tiers.use([block.block_hash for block, tier in run if tier == "host"])

        def rows() -> list[Row]:
            ready_rows: list[Row] = []
            for block, tier in run:
                row = staged[block.block_hash][1] if tier == "staged" else self.tiers.row(block.block_hash)
                if row is None:
                    break
                ready_rows.append(row)
            return ready_rows

        started_s = perf_counter()
        loaded = install_blocks(self._cache, self._runner, sequence.hashed_tokens, matched, len(run), rows)
        duration_s = perf_counter() - started_s
        self._room_blocks -= loaded
        for _, tier in run[:loaded]:
            self.tiers.indexes["disk" if tier == "staged" else "host"].counts.hits += 1
        if loaded and not staged:
            self._rule.observe("host", loaded * self.tiers.size_bytes, duration_s)
            self._times["host"].observe(duration_s)
        return loaded

    def _observe(self, load: DiskLoad) -> None:
        load.observed = True
        if load.blocks:
            self._rule.observe("disk", len(load.blocks) * self.tiers.size_bytes, load.duration_s)
        self._times["disk"].observe(load.duration_s)


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
