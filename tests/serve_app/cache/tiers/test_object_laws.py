"""Laws of a store that two replicas share, under any order of their writes, reads, resets and restarts."""

import numpy as np
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.protocol.block_hash import PrefixScope
from serve_app.cache.prefix_digest import scope_digest
from serve_app.cache.tiers.object import ABSENT_S, ObjectStore
from tests.serve_app.cache.tiers.tier_blocks import FORMAT, content, path, wanted

SCOPES = {"a": PrefixScope("m", salt=b"a"), "b": PrefixScope("m", salt=b"b")}
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=4)
TENANTS, REPLICAS = st.sampled_from("ab"), st.integers(0, 1)


class SharedStore(RuleBasedStateMachine):
    """Two replicas; tenant b's first request has arrived at replica 0 only."""

    @initialize()
    def begin(self) -> None:
        self.now_s = 0.0
        self.file_system = MemoryFileSystem(skip_instance_cache=True)
        self.file_system.store, self.file_system.pseudo_dirs = {}, [""]
        self.stored: set[bytes] = set()
        self.replicas = [self.made(number) for number in (0, 1)]

    def made(self, number: int) -> ObjectStore:
        store = ObjectStore(self.file_system, "/kv", 1 << 30, FORMAT, clock=lambda: self.now_s)
        for tenant in "ab"[: 2 - number]:
            store.learn(scope_digest(SCOPES[tenant]), SCOPES[tenant].root(b"k"))
        return store

    @rule(replica=REPLICAS, tenant=TENANTS, branches=PATHS)
    def write(self, replica: int, tenant: str, branches: list[int]) -> None:
        """A block is stored where its tenant is known, and it needs no other block."""
        block = path(*branches, scope=SCOPES[tenant], tenant=tenant)[-1]
        known_here = (replica, tenant) != (1, "b")
        assert self.replicas[replica].store(block, content(block)) == known_here
        if known_here:
            self.stored.add(block.block_hash)

    @rule(replica=REPLICAS, tenant=TENANTS, branches=PATHS)
    def read(self, replica: int, tenant: str, branches: list[int]) -> None:
        """Every replica reads what any has written, from a prefix's beginning up to the first absent block."""
        self.now_s += ABSENT_S + 1
        blocks = path(*branches, scope=SCOPES[tenant], tenant=tenant)
        there = [block.block_hash in self.stored and (replica, tenant) != (1, "b") for block in blocks]
        expected = blocks[: [*there, False].index(False)]
        store = self.replicas[replica]
        assert store.holds(blocks[0]) == ((replica, tenant) != (1, "b"))
        found = list(store.read(wanted(blocks)))
        assert [block for block, _ in found] == expected
        assert all(np.array_equal(row, content(block)) for block, row in found)
        if len(found) < len(blocks) and (replica, tenant) != (1, "b"):
            assert not store.holds(blocks[len(found)]), "it is not asked for again at once"

    @rule()
    def reset(self) -> None:
        for finish in [replica.forget_all() for replica in self.replicas]:
            finish()
        self.stored.clear()
        assert self.file_system.find("/kv") == []

    @rule(replica=REPLICAS)
    def restart(self, replica: int) -> None:
        self.replicas[replica].close()
        self.replicas[replica] = self.made(replica)

    @invariant()
    def names_and_contents_tell_nothing(self) -> None:
        names = self.file_system.find("/kv")
        assert len(names) == len(self.stored)
        for name in names:
            data = self.file_system.cat_file(name)
            assert not any(block_hash.hex() in name or block_hash in data for block_hash in self.stored)

    @invariant()
    def nothing_failed(self) -> None:
        assert all((store.counts.failures, store.refused_files) == (0, 0) for store in self.replicas)


TestSharedStore = SharedStore.TestCase
TestSharedStore.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
