"""Laws of tenants' shares of a tier, host memory or disk, with a naive tier as oracle."""

import math
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from serve_app.cache.prefix.quota import CACHE_ACTIVE_S
from serve_app.cache.prefix_digest import TierBlock
from serve_app.cache.tiers import disk as disk_tier
from serve_app.cache.tiers.tier_index import account_key
from serve_app.cache.tiers.tiers import Tiers
from tests.harness.tiers import tier_settings
from tests.serve_app.cache.tiers.test_disk import FILE
from tests.serve_app.cache.tiers.tier_blocks import (
    BYTES,
    FORMAT,
    Source,
    TierMachine,
    content,
    disk_of,
    held,
    path,
    wanted,
)

SHARES = {"a": 1.0, "b": 2.0, "c": 1.0}
OWNERS = {account_key(tenant): tenant for tenant in SHARES}
NUMBERS = st.integers(0, 7)
TENANTS = st.sampled_from(list(SHARES))


def block_of(tenant: str, number: int) -> TierBlock:
    return path("abc".index(tenant) * 10 + number, tenant=tenant)[0]


@dataclass
class NaiveBlock:
    """The oracle's record of a block. ``place``: in its queue; ``used``: the order of use, which a restart restores."""

    owner: str
    place: int
    used: int
    saved: bool


class NaiveTier:
    """Remembers every block, and searches all of them each time."""

    def __init__(self, blocks: int, active_s: float) -> None:
        self.blocks, self.active_s, self.shares = blocks, active_s, SHARES
        self.held: dict[bytes, NaiveBlock] = {}
        self.seen_s: dict[str, float] = {}
        self.ticks = 0

    def tick(self) -> int:
        self.ticks += 1
        return self.ticks

    def excess(self, tenant: str, now_s: float) -> float:
        holding = sum(1 for block in self.held.values() if block.owner == tenant)
        return holding / self.shares[tenant] if self.active(tenant, now_s) else math.inf

    def active(self, tenant: str, now_s: float) -> bool:
        return tenant in self.seen_s and now_s - self.seen_s[tenant] <= self.active_s

    def share(self, tenant: str, now_s: float) -> float:
        weights = sum(weight for name, weight in self.shares.items() if self.active(name, now_s))
        return self.blocks * self.shares[tenant] / weights if self.active(tenant, now_s) else 0.0

    def may_go(self, owner: str, now_s: float, *, saved: bool) -> set[bytes]:
        """Return the blocks that a block of ``owner`` may displace: one of each tenant that is most over its share."""
        holding = Counter(block.owner for block in self.held.values())
        most = max(self.excess(tenant, now_s) for tenant in holding)
        givers = [tenant for tenant in holding if self.excess(tenant, now_s) == most]
        if owner in givers:
            givers = [owner]
            if not saved and all(block.saved for block in self.held.values() if block.owner == owner):
                return set()
        return {min(self.of(tenant), key=lambda h: (self.held[h].saved, self.held[h].place)) for tenant in givers}

    def of(self, tenant: str) -> list[bytes]:
        return [block_hash for block_hash, block in self.held.items() if block.owner == tenant]

    def use(self, block_hash: bytes) -> None:
        block = self.held[block_hash]
        block.place = block.used = self.tick()

    def mark(self, block_hash: bytes, *, saved: bool) -> None:
        block = self.held[block_hash]
        if block.saved != saved:
            block.saved, block.place = saved, self.tick()


class ShareMachine(TierMachine):
    """Blocks are stored, saves begin and end, tenants become inactive, processes restart. (docs: caching)"""

    @initialize(disk=st.booleans(), blocks=st.integers(1, 9))
    def begin(self, disk: bool, blocks: int) -> None:
        self.now_s = 0.0
        self.directory = Path(tempfile.mkdtemp(prefix="shares-"))
        self.disk, self.blocks = disk, blocks
        self.naive = NaiveTier(blocks, disk_tier.DISK_ACTIVE_S if disk else CACHE_ACTIVE_S)
        self.live()

    def live(self) -> None:
        bounds = (0, self.blocks * FILE) if self.disk else (self.blocks * BYTES, 0)
        self.open(tier_settings(*bounds, self.directory), shares=self.naive.shares, clock=lambda: self.now_s)

    def hashes(self) -> set[bytes]:
        (index,) = self.tiers.indexes.values()
        return held(index)

    def put(self, tenant: str, number: int, *, saved: bool) -> None:
        """Store a block, and compare the evicted block with those allowed by the law and by the oracle."""
        naive, now_s, block = self.naive, self.now_s, block_of(tenant, number)
        block_hash, before = block.block_hash, self.hashes()
        if saved:
            self.tiers.save([block], Source([block]), math.inf)
        else:
            self.tiers.spill([block], Source([block]))
        self.work()
        lost = before - self.hashes()
        if block_hash in naive.held:
            assert not lost
            naive.use(block_hash)
            if saved:
                naive.mark(block_hash, saved=True)
            return
        may_go = naive.may_go(tenant, now_s, saved=saved) if len(before) == self.blocks else set()
        assert len(lost) == bool(may_go)
        assert lost <= may_go
        assert (block_hash in self.hashes()) == (len(before) < self.blocks or bool(may_go))
        for gone in lost:
            name = naive.held[gone].owner
            within = naive.excess(name, now_s) * naive.shares[name] <= naive.share(name, now_s)
            others = (other for other in SHARES if other != name and naive.of(other))
            over = [other for other in others if len(naive.of(other)) > naive.share(other, now_s)]
            assert not (within and over), f"{name} gave a block while {over} were over their shares"
            if naive.held[gone].saved:
                assert all(naive.held[other].saved for other in naive.of(name))
            del naive.held[gone]
        if block_hash in self.hashes():
            tick = naive.tick()
            naive.held[block_hash] = NaiveBlock(tenant, tick, tick, saved)

    @rule(tenant=TENANTS, number=NUMBERS)
    def spill(self, tenant: str, number: int) -> None:
        self.put(tenant, number, saved=False)

    @precondition(lambda self: self.disk)
    @rule(tenant=TENANTS, number=NUMBERS)
    def save(self, tenant: str, number: int) -> None:
        self.put(tenant, number, saved=True)

    @precondition(lambda self: self.disk)
    @rule(tenant=TENANTS, number=NUMBERS)
    def end_save(self, tenant: str, number: int) -> None:
        block_hash = block_of(tenant, number).block_hash
        self.tiers.end_save([block_hash])
        self.work()
        if block_hash in self.naive.held:
            self.naive.mark(block_hash, saved=False)

    @precondition(lambda self: not self.disk)
    @rule(tenant=TENANTS, number=NUMBERS)
    def use(self, tenant: str, number: int) -> None:
        block_hash = block_of(tenant, number).block_hash
        self.tiers.use([block_hash])
        if block_hash in self.naive.held:
            self.naive.use(block_hash)

    @rule(tenants=st.lists(TENANTS, max_size=3))
    def ask(self, tenants: list[str]) -> None:
        self.tiers.seen(tenants)
        self.naive.seen_s.update(dict.fromkeys(tenants, self.now_s))

    @rule(weights=st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=3, max_size=3))
    def reweigh(self, weights: list[float]) -> None:
        """Change the settings: no tenant loses a block by that, and the next eviction uses the new shares."""
        self.naive.shares = dict(zip(SHARES, weights, strict=True))
        self.tiers.set_shares(self.naive.shares)

    @rule(seconds=st.sampled_from([1.0, CACHE_ACTIVE_S + 1, disk_tier.DISK_ACTIVE_S + 1]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @precondition(lambda self: self.disk)
    @rule()
    def restart(self) -> None:
        """Owners, saves and the order of use are on disk; owners of files count as active at their last use: now."""
        self.tiers.close(0.0)
        self.live()
        for block in self.naive.held.values():
            block.place = block.used
        self.naive.seen_s = {block.owner: self.now_s for block in self.naive.held.values()}

    @rule()
    def reset(self) -> None:
        self.tiers.clear()
        self.work()
        self.naive.held.clear()

    @invariant()
    def held_equals_the_oracle(self) -> None:
        assert self.hashes() == set(self.naive.held)
        saved = {block_hash for block_hash, block in self.naive.held.items() if block.saved}
        assert held(*self.tiers.indexes.values(), saved=True) == saved

    @invariant()
    def bytes_are_exact_by_tenant(self) -> None:
        (index,) = self.tiers.indexes.values()
        size = FILE if self.disk else BYTES
        if self.disk:
            assert index.used_bytes == sum(file.stat().st_size for file in self.directory.rglob("slot-*/*"))
        counted = Counter(block.owner for block in self.naive.held.values())
        assert {OWNERS[owner]: size_bytes for owner, size_bytes in index.holdings().items()} == {
            tenant: blocks * size for tenant, blocks in counted.items()
        }
        assert index.used_bytes == len(self.naive.held) * size <= self.blocks * size


TestShareLaws = ShareMachine.TestCase
TestShareLaws.settings = settings(max_examples=150, stateful_step_count=40)


def test_a_batch_larger_than_its_owners_share_is_spilled_whole(tmp_path: Path) -> None:
    """Later blocks of the batch displace earlier ones, which are read first and reach the disk unchanged."""
    settings = tier_settings(6 * BYTES, 100 * FILE, tmp_path)
    tiers = Tiers(settings, FORMAT, BYTES, lambda: None, shares=SHARES, start=False)
    tiers.seen(["a", "c"])
    theirs, batch = path(9, 9, 9, tenant="c")[::-1], path(*range(8), tenant="a")[::-1]
    for blocks in (theirs, batch):
        tiers.spill(blocks, Source(blocks))
    rows = [tiers.row(block) for block in (*theirs, *batch)]
    assert [row is not None for row in rows] == [True] * 3 + [False] * 5 + [True] * 3
    disk = disk_of(tiers)
    assert disk is not None
    load = disk.load(wanted(batch[:5]))
    while disk.run():
        pass
    loaded = [load.blocks[block.block_hash][1] for block in batch[:5]]
    for block, row in zip((*theirs, *batch), rows[:3] + loaded + rows[8:], strict=True):
        assert np.array_equal(row, content(block))  # type: ignore[arg-type]
    tiers.close(0.0)
