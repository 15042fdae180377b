"""A tier below the pool: the interface of all of them, and what one is opened with.

A tier is a file here with a function that opens it, named in ``config.cache.CACHE_TIERS`` beside its settings. The
engine's loop calls a tier; only one behind a ``TierQueue`` has a thread. A batch has children first, so heads are
evicted last.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from router.protocol.samples import Histogram, Labels, Rate, Sample
from serve_app.cache.kv_chain import KvFormat, Row
from serve_app.cache.prefix_digest import TierBlock
from serve_app.cache.tiers.tier_index import TierCounts, TierIndex
from serve_app.config.cache import CacheSection

ReadRows = Callable[[Sequence[int], Sequence[Row]], None]
"""Copies the batch's blocks at these indices from the tier above into the given rows."""

Wake = Callable[[], None]

LOAD_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

_EXPECTED_WEIGHT_S = 0.05
_MEMORY_S = 1.0
_FORGET = 0.99


@dataclass(frozen=True, slots=True)
class TierParts:
    """What a tier is opened with. ``size_bytes``: of a block. ``wake``: called from a tier's thread after a result.

    ``settings.save_ttl_s`` also limits a previous run's saves. ``start`` False: no threads; call ``TierQueue.run``.
    """

    settings: CacheSection
    format: KvFormat
    size_bytes: int
    wake: Wake
    shares: Mapping[str, float] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    start: bool = True

    def check_bound(self, name: str, most_bytes: int) -> None:
        """Raise ValueError if a bound holds no block."""
        if most_bytes < self.size_bytes:
            raise ValueError(f"{name}={most_bytes} cannot hold one KV block of {self.size_bytes} bytes")


class Wanted(NamedTuple):
    """A block that a request wants. ``prefix_digest`` proves it, where its hash might collide.

    ``scope``: the digest of its scope. All fields are those of ``TierBlock``.
    """

    block_hash: bytes
    prefix_digest: bytes
    scope: bytes


class TierLoad:
    """A load of blocks of one prefix, parents first. Once ``done``, ``blocks`` has the longest readable run."""

    def __init__(self, tier: "Tier", blocks: Sequence[Wanted]) -> None:
        self.tier = tier
        self.wanted = tuple(blocks)
        self.names = frozenset(one.block_hash for one in blocks)
        self.blocks: dict[bytes, tuple[TierBlock, Row]] = {}
        self.duration_s = 0.0
        self.observed = False
        self.done = False


class LoadRule:
    """The rule to load KV: bytes / bandwidth <= ratio * tokens / prefill rate. Not thread-safe.

    The bandwidth is that of about the last second of loading, at first an expected one.
    """

    def __init__(self, ratio: float, expected_bytes_per_s: float) -> None:
        self.ratio = ratio
        self._expected = self._rate = Rate(expected_bytes_per_s * _EXPECTED_WEIGHT_S, _EXPECTED_WEIGHT_S)

    @property
    def bytes_per_s(self) -> float:
        """The current estimate of the bandwidth."""
        return self._rate.per_s

    def observe(self, loaded_bytes: int, duration_s: float) -> None:
        """Update the estimate with a load's measured duration."""
        self._rate = self._rate.then(loaded_bytes, duration_s, math.exp(-duration_s / _MEMORY_S))

    def worthwhile(self, size_bytes: int, tokens: int, prefill_tokens_per_s: float) -> bool:
        """Return whether to load; True at an unknown prefill rate (0). A refusal moves the rate to the expected."""
        if self.ratio <= 0.0:
            return False
        if prefill_tokens_per_s <= 0.0 or size_bytes / self.bytes_per_s <= self.ratio * tokens / prefill_tokens_per_s:
            return True
        expected = self._expected
        self._rate = self._rate.then((1 - _FORGET) * expected.amount, (1 - _FORGET) * expected.seconds, _FORGET)
        return False


class Tier(ABC):
    """One tier. What is not abstract here is optional.

    ``counts``: since the start. ``expected_bytes_per_s``: its bandwidth until measured. ``keeps``: blocks outlive the
    process, and saves go there. ``below``: the next slower tier, which gets the blocks evicted here. ``index``: what
    this replica holds here and tells routers; None: it tells nothing.
    """

    name: str
    counts: TierCounts
    expected_bytes_per_s: float
    keeps = False
    index: TierIndex[Any] | None = None

    def __init__(self, parts: TierParts, below: "Tier | None") -> None:
        self.below = below
        self.rule = LoadRule(parts.settings.tier_load_ratio, self.expected_bytes_per_s)
        self.load_seconds = Histogram(LOAD_BUCKETS_S)
        self._size_bytes = parts.size_bytes

    @abstractmethod
    def holds(self, block: Wanted | TierBlock) -> bool:
        """Return whether a block is here, or worth a ``load`` that may find it."""

    def row(self, block_hash: bytes) -> Row | None:
        """Return the bytes of a block that needs no load, a view until the next ``put``."""
        return None

    def load(self, blocks: Sequence[Wanted]) -> TierLoad:
        """Start reading blocks without a ``row``, parents first; nothing where every block has one."""
        load = TierLoad(self, blocks)
        load.done = True
        return load

    def loaded(self, blocks: int, duration_s: float) -> None:
        """Note a load's duration; one that found nothing says nothing about the bandwidth."""
        self.load_seconds.observe(duration_s)
        if blocks:
            self.rule.observe(blocks * self._size_bytes, duration_s)

    @abstractmethod
    def put(self, blocks: Sequence[TierBlock], read: ReadRows, saved_until_s: float | None = None) -> bool:
        """Store a batch; blocks already here are only marked as used. Return whether all are or will be stored.

        ``saved_until_s``: the expiry of their save (Unix time), for a tier that ``keeps``.
        """

    def learn(self, scope: bytes, root: bytes) -> None:  # noqa: B027
        """Note the keyed root of a scope, by the scope's digest, before any block of it is put or wanted."""

    def use(self, hashes: Sequence[bytes]) -> None:  # noqa: B027
        """Mark blocks with a ``row``, children first, as the most recently used."""

    def mark(self, hashes: Sequence[bytes], saved_until_s: float | None) -> None:  # noqa: B027
        """Set the expiry of blocks' saves; None: not saved."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all blocks, including saved ones."""

    def wait_for_room(self, blocks: int, deadline_s: float) -> None:  # noqa: B027
        """Block until ``put`` takes ``blocks``, or as many as it ever does, or until ``deadline_s`` (monotonic)."""

    def close(self, deadline_s: float) -> None:  # noqa: B027
        """Give what ends with the process to a tier that ``keeps``, until about ``deadline_s`` (monotonic)."""

    def samples(self, labels: Labels) -> Iterable[Sample]:
        """Yield blocks, bytes, counters and load times."""
        labels = (*labels, ("tier", self.name))
        if self.index is not None:
            yield "warmpath_kv_tier_blocks", labels, float(len(self.index))
            yield "warmpath_kv_tier_bytes", labels, float(self.index.used_bytes)
        yield "warmpath_kv_tier_hits_total", labels, float(self.counts.hits)
        yield "warmpath_kv_tier_stores_total", labels, float(self.counts.stores)
        yield "warmpath_kv_tier_drops_total", labels, float(self.counts.drops)
        yield "warmpath_kv_tier_evicted_blocks_total", labels, float(self.counts.evicted_blocks)
        yield "warmpath_kv_tier_failures_total", labels, float(self.counts.failures)
        yield from self.load_seconds.samples("warmpath_kv_tier_load_seconds", labels)
