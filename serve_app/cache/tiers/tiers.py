"""The tiers below the pool as one: a list, the fastest first. What a tier evicts goes to the next one.

The engine's loop owns it. A batch has children first, so heads are evicted last.
"""

import pkgutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from router.protocol.events import TierDigest
from router.protocol.samples import Labels, Sample
from serve_app.cache.kv_chain import KvFormat, Row
from serve_app.cache.prefix_digest import TierBlock
from serve_app.cache.tiers.tier import ReadRows, Tier, TierParts, Wake, Wanted
from serve_app.cache.tiers.tier_index import TierEvent, TierIndex, account_key
from serve_app.config.cache import CACHE_TIERS, CacheSection


class Tiers:
    """The tiers below one pool. ``size_bytes``: of a block. ``indexes``: of tiers that tell routers their blocks."""

    def __init__(
        self,
        settings: CacheSection,
        kv_format: KvFormat,
        size_bytes: int,
        wake: Wake,
        *,
        shares: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
        start: bool = True,
    ) -> None:
        """Open the tiers; those that keep have a previous run's blocks. Raises OSError or ValueError."""
        parts = TierParts(settings, kv_format, size_bytes, wake, shares or {}, clock, start)
        self.size_bytes = size_bytes
        self.tiers: list[Tier] = []
        below: Tier | None = None
        for opener in CACHE_TIERS:
            tier: Tier | None = pkgutil.resolve_name(opener)(parts, below)
            if tier is not None:
                below = tier
                self.tiers.insert(0, tier)
        self.indexes: dict[str, TierIndex[Any]] = {
            tier.name: tier.index for tier in self.tiers if tier.index is not None
        }
        self.keeping = [tier for tier in self.tiers if tier.keeps]

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

    def learn(self, scope: bytes, root: bytes) -> None:
        """Note the keyed root of a scope, by the scope's digest, before any block of it is spilled or wanted."""
        for tier in self.tiers:
            tier.learn(scope, root)

    def holder(self, block: Wanted | TierBlock) -> Tier | None:
        """Return the fastest tier that has a block, or may have it."""
        return next((tier for tier in self.tiers if tier.holds(block)), None)

    def row(self, block: Wanted | TierBlock) -> Row | None:
        """Return the bytes of a block that needs no load, a view until the next spill."""
        tier = self.holder(block)
        return tier.row(block.block_hash) if tier is not None else None

    def use(self, hashes: Sequence[bytes]) -> None:
        """Mark blocks that need no load (parents first) as needed, so that they are evicted last."""
        for tier in self.tiers:
            tier.use(hashes[::-1])

    def spill(self, blocks: Sequence[TierBlock], read: ReadRows) -> None:
        """Store blocks that leave the pool, children first. Blocks already held are only marked as used."""
        if self.tiers:
            self.tiers[0].put(blocks, read)

    def save(self, blocks: Sequence[TierBlock], read: ReadRows, until_s: float) -> bool:
        """Write or mark blocks (children first) as saved until a Unix time; False: no tier keeps them all."""
        kept = [tier.put(blocks, read, until_s) for tier in self.keeping]
        return any(kept)

    def end_save(self, hashes: Sequence[bytes]) -> None:
        """Make saved blocks ordinary blocks again."""
        for tier in self.keeping:
            tier.mark(hashes, None)

    def clear(self) -> None:
        """Forget all blocks, including saved ones."""
        for tier in self.tiers:
            tier.clear()

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
        """Block until a spill of ``blocks`` loses none, as far as there ever is space, or until ``deadline_s``."""
        for tier in self.tiers:
            tier.wait_for_room(blocks, deadline_s)

    def close(self, deadline_s: float) -> None:
        """Write what would end with the process, until about ``deadline_s`` (monotonic), and end all threads."""
        for tier in self.tiers:
            tier.close(deadline_s)
        self.keeping = []

    def samples(self, labels: Labels) -> Iterable[Sample]:
        """Return blocks, bytes, counters and load times by tier."""
        return chain.from_iterable(tier.samples(labels) for tier in self.tiers)
