"""Laws of host and disk tier under any sequence of spills, loads, saves and restarts."""

import math
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.protocol.block_hash import split_chain, xor_of_words
from router.protocol.events import BlocksStored
from serve_app.cache.prefix_digest import TierBlock
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

PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=4)


class Spills(TierMachine):
    """A pool that holds a tree of prefixes: evictions spill leaves, and heads are evicted last."""

    @initialize(host=st.sampled_from([0, 1, 3, 6]), disk=st.sampled_from([0, 2, 7, 40]))
    def begin(self, host: int, disk: int) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="tiers-"))
        self.host_blocks, self.disk_blocks = host, disk
        self.settings = tier_settings(host * BYTES, disk * FILE, self.directory if disk else None)
        self.known: dict[bytes, TierBlock] = {}
        self.saved: set[bytes] = set()
        self.live()

    def live(self) -> None:
        self.open(self.settings)
        self.announced: dict[str, set[bytes]] = {"host": set(), "disk": set()}

    def held_in(self, tier: str, *, saved: bool | None = None) -> set[bytes]:
        return held(self.tiers.indexes[tier], saved=saved) if tier in self.tiers.indexes else set()

    def found(self, block_hash: bytes) -> bool:
        return self.tiers.holder(self.known[block_hash]) is not None

    @rule(branches=PATHS)
    def spill(self, branches: list[int]) -> None:
        """Spill a prefix from the pool, tail first; with space on disk no known block is lost."""
        blocks = path(*branches)[::-1]
        self.known.update({block.block_hash: block for block in blocks})
        before = {block_hash for block_hash in self.known if self.found(block_hash)}
        self.tiers.spill(blocks, Source(blocks))
        head = blocks[-1].block_hash
        if self.host_blocks or self.disk_blocks:
            assert self.found(head) or self.saved, "the head of a prefix is evicted last"
        if self.disk_blocks >= 40:
            assert all(map(self.found, before | {block.block_hash for block in blocks}))

    @rule(branches=PATHS)
    def use(self, branches: list[int]) -> None:
        self.tiers.use([block.block_hash for block in path(*branches)])

    @rule(branches=PATHS)
    def load(self, branches: list[int]) -> None:
        """Every loaded block is the requested one, byte for byte."""
        disk = disk_of(self.tiers)
        if disk is None:
            return
        load = disk.load(wanted(path(*branches)))
        self.work()
        assert load.done
        for block_hash, (block, row) in load.blocks.items():
            assert block == self.known[block_hash]
            assert np.array_equal(row, content(block))

    @rule(branches=PATHS)
    def save(self, branches: list[int]) -> None:
        """Saved blocks are evicted after all others, as long as they fit."""
        blocks = path(*branches)[::-1]
        names = {block.block_hash for block in blocks}
        self.known.update({block.block_hash: block for block in blocks})
        self.work()
        complete = self.tiers.save(blocks, Source(blocks), math.inf)
        assert complete == bool(self.disk_blocks)
        self.work()
        if len(self.saved | names) <= self.disk_blocks:
            self.saved |= names
            assert names <= self.held_in("disk", saved=True)

    @rule()
    def settle(self) -> None:
        self.work()

    @rule()
    def reset(self) -> None:
        self.tiers.clear()
        self.saved.clear()
        self.work()
        assert not any(map(self.found, self.known))

    @rule()
    def restart(self) -> None:
        """A closed engine's disk serves a new engine; host memory is spilled to it first."""
        self.work()
        expected = self.held_in("disk") | self.held_in("host")
        self.tiers.close(1e9)
        self.live()
        if self.disk_blocks and len(expected) <= self.disk_blocks:
            assert self.held_in("disk") == expected

    @invariant()
    def announced_equals_held(self) -> None:
        for event in self.tiers.take_events():
            told = self.announced[event.tier]
            for block_hash in split_chain(event.hashes):
                assert isinstance(event, BlocksStored) == (block_hash not in told)
                told ^= {block_hash}
        assert self.announced == {tier: self.held_in(tier) for tier in ("host", "disk")}
        for digest in self.tiers.digests():
            told = self.announced[digest.tier]
            assert (digest.blocks, digest.xor) == (len(told), xor_of_words(b"".join(told)))

    @invariant()
    def rows_are_right(self) -> None:
        for block_hash in self.held_in("host"):
            row = self.tiers.row(self.known[block_hash])
            assert row is not None
            assert np.array_equal(row, content(self.known[block_hash]))

    @invariant()
    def bytes_are_exact_and_bounded(self) -> None:
        told = {(name, dict(labels)["tier"]): value for name, labels, value in self.tiers.samples(())}
        if self.host_blocks:
            assert told["warmpath_kv_tier_bytes", "host"] == len(self.announced["host"]) * BYTES
            assert len(self.announced["host"]) <= self.host_blocks
        if self.disk_blocks:
            real = sum(file.stat().st_size for file in self.directory.rglob("slot-*/*"))
            assert told["warmpath_kv_tier_bytes", "disk"] == real <= self.disk_blocks * FILE
            assert told["warmpath_kv_tier_blocks", "disk"] == len(self.announced["disk"])


TestTierLaws = Spills.TestCase
TestTierLaws.settings = settings(max_examples=60, stateful_step_count=25)


class PoolAndHost(RuleBasedStateMachine):
    """No gap ever forms: if pool or host memory holds a block, they also hold all blocks before it."""

    @initialize(host=st.integers(1, 6))
    def begin(self, host: int) -> None:
        self.tiers = Tiers(tier_settings(host * BYTES), FORMAT, BYTES, lambda: None)
        self.pool: list[tuple[int, ...]] = []

    def hash_of(self, prefix: tuple[int, ...]) -> bytes:
        return path(*prefix)[-1].block_hash

    @rule(branches=PATHS)
    def request(self, branches: list[int]) -> None:
        """Load blocks from host memory, or compute them; then use the whole prefix, tail first."""
        prefixes = [tuple(branches[: i + 1]) for i in range(len(branches))]
        self.tiers.use([self.hash_of(prefix) for prefix in prefixes])
        self.pool = [prefix for prefix in self.pool if prefix not in prefixes] + prefixes[::-1]

    @rule(count=st.integers(1, 6))
    def evict(self, count: int) -> None:
        leaves = []
        while self.pool and len(leaves) < count:
            leaf = next(p for p in self.pool if not any(q[:-1] == p for q in self.pool))
            self.pool.remove(leaf)
            leaves.append(path(*leaf)[-1])
        if leaves:
            self.tiers.spill(leaves, Source(leaves))

    @invariant()
    def prefixes_are_whole(self) -> None:
        every = [p for n in range(1, 5) for p in np.ndindex(*(2,) * n)]
        held = {p for p in every if p in self.pool or self.tiers.holder(path(*p)[-1]) is not None}
        assert all(len(p) == 1 or p[:-1] in held for p in held)


TestPoolAndHost = PoolAndHost.TestCase
TestPoolAndHost.settings = settings(max_examples=60, stateful_step_count=25)
