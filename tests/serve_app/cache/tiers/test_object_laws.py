"""Laws of a store that two replicas share, under any order of their writes, reads, resets and restarts."""

import threading
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.protocol.block_hash import PrefixScope
from serve_app.cache.prefix_digest import scope_digest
from serve_app.cache.tiers.object import ABSENT_S, FRESH_S, ObjectStore
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


@pytest.mark.parametrize("times", [-1000.0, -1.0, 0.0, 0.5, 1.0, 2.0, 1000.0])
def test_what_a_writer_left_midway_is_removed_once_no_writer_can_be_at_it(times: float) -> None:
    """By its age in `FRESH_S`; below zero: the clock was set back. Whole objects stay at any age, within the bound."""
    file_system = MemoryFileSystem(skip_instance_cache=True)
    file_system.store, file_system.pseudo_dirs = {}, [""]
    now_s = 2e9
    store = ObjectStore(file_system, "/kv", 1 << 30, FORMAT, clock=lambda: 0.0, wall_clock=lambda: now_s)
    names = ["/kv/a.kv", "/kv/b.kv.1.tmp"]
    for name in names:
        file_system.pipe_file(name, b"x")
        file_system.store[name].created = datetime.fromtimestamp(now_s - times * FRESH_S, UTC)
    store._sweep()
    assert file_system.find("/kv") == (names if times <= 1 else names[:1])


class Direct:
    """One store, and another of the same folder; all of a prefix's three blocks are written."""

    def __init__(self) -> None:
        self.file_system = MemoryFileSystem(skip_instance_cache=True)
        self.file_system.store, self.file_system.pseudo_dirs = {}, [""]
        self.blocks = path(0, 1, 1, scope=SCOPES["a"])
        self.store = self.opened(b"k")
        assert all(self.store.store(block, content(block)) for block in self.blocks)

    def opened(self, secret: bytes) -> ObjectStore:
        store = ObjectStore(self.file_system, "/kv", 1 << 30, FORMAT, clock=lambda: 0.0)
        store.learn(scope_digest(SCOPES["a"]), SCOPES["a"].root(secret))
        return store

    def objects(self) -> dict[str, bytes]:
        return {name: self.file_system.cat_file(name) for name in self.file_system.find("/kv")}


def test_another_secret_opens_no_block_even_if_it_knows_all_hashes() -> None:
    """Neither by its name, nor if its object is put where the other secret looks."""
    direct = Direct()
    own = direct.objects()
    stranger = direct.opened(b"another")
    assert list(stranger.read(wanted(direct.blocks))) == []
    assert stranger.refused_files == 0
    stranger = direct.opened(b"another")
    assert stranger.store(direct.blocks[0], content(direct.blocks[0]))
    (name,) = direct.objects().keys() - own.keys()
    for data in own.values():
        direct.file_system.pipe_file(name, data)
        assert list(direct.opened(b"another").read(wanted(direct.blocks))) == []


def test_of_an_object_that_somebody_made_large_no_more_is_read_than_a_block_has() -> None:
    direct = Direct()
    read = list[int]()
    for name, data in direct.objects().items():
        direct.file_system.pipe_file(name, data + b"x" * (8 << 20))
    whole = direct.file_system.cat_file

    def counting(*args: Any, **kwargs: Any) -> bytes:
        data: bytes = whole(*args, **kwargs)
        read.append(len(data))
        return data

    direct.file_system.cat_file = counting
    assert list(direct.opened(b"k").read(wanted(direct.blocks))) == []
    assert read
    assert max(read) < FORMAT.block_bytes + (1 << 20)


def test_between_a_reset_and_its_end_nothing_is_read_or_written() -> None:
    direct = Direct()
    finish = direct.store.forget_all()
    assert not direct.store.holds(direct.blocks[0])
    assert list(direct.store.read(wanted(direct.blocks))) == []
    assert not direct.store.store(direct.blocks[0], content(direct.blocks[0]))
    assert len(direct.objects()) == 3
    finish()
    assert direct.objects() == {}
    assert direct.store.store(direct.blocks[0], content(direct.blocks[0]))


def test_a_block_that_is_being_written_during_a_reset_is_not_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the call ends after the reset has removed all others."""
    direct = Direct()
    write = direct.file_system.pipe_file

    def reset_first(*args: object, **named: object) -> None:
        monkeypatch.setattr(direct.file_system, "pipe_file", write)
        direct.store.forget_all()()
        write(*args, **named)

    monkeypatch.setattr(direct.file_system, "pipe_file", reset_first)
    other = path(1, scope=SCOPES["a"])[0]
    assert not direct.store.store(other, content(other))
    assert direct.objects() == {}


def test_a_harmed_block_is_written_again_by_the_replica_that_wrote_it() -> None:
    direct = Direct()
    assert all(map(direct.store.known, direct.blocks))
    for name in direct.objects():
        direct.file_system.pipe_file(name, b"harmed")
    assert list(direct.store.read(wanted(direct.blocks))) == []
    assert [direct.store.known(block) for block in direct.blocks] == [None, True, True]
    assert (direct.store.refused_files, direct.store.counts.failures) == (1, 0)


def test_blocks_in_use_outlive_unused_ones_that_are_younger() -> None:
    """A replica that loads and evicts a block makes it young again, however often it is read."""
    direct = Direct()
    used, *_ = direct.blocks
    files = direct.file_system.store
    by_age = sorted(files, key=lambda name: files[name].created)
    assert len(by_age) == 3
    reader = direct.opened(b"k")
    assert len(list(reader.read(wanted([used])))) == 1
    assert reader.known(used) is None
    assert reader.store(used, content(used))
    small = ObjectStore(direct.file_system, "/kv", 3 * len(next(iter(direct.objects().values()))) - 1, FORMAT)
    small.learn(scope_digest(SCOPES["a"]), SCOPES["a"].root(b"k"))
    younger = path(1, scope=SCOPES["a"])[0]
    assert small.store(younger, content(younger))
    pause = threading.Event()
    for _ in range(2000):
        if len(direct.objects()) <= 2:
            break
        pause.wait(0.005)
    assert by_age[0] in direct.objects() and by_age[1] not in direct.objects()
