"""Laws of the prefix cache under any sequence of operations, with a naive cache as oracle."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from router.block_hash import PrefixScope, hash_blocks, split_chain
from router.events import BlocksRemoved, BlocksStored, CacheCleared
from serve_app.cache.prefix_cache import PrefixCache
from tests.serve_app.cache.naive_cache import NaiveCache

BLOCKS, SIZE = 12, 2
SCOPES = (PrefixScope("m", salt=b"a"), PrefixScope("m", salt=b"b"))
ROOTS = {scope: scope.root(b"k") for scope in SCOPES}


class Running:
    """A sequence as the engine would hold it."""

    def __init__(self, scope: PrefixScope, ids: list[int], blocks: list[int], published: int) -> None:
        self.scope, self.ids, self.blocks, self.published = scope, ids, blocks, published


class CacheMachine(RuleBasedStateMachine):
    """Admit, publish part by part, release, reset: then look whether every law still holds."""

    running = Bundle("running")

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(BLOCKS, SIZE)
        self.oracle = NaiveCache(SIZE)
        self.held: list[Running] = []
        self.announced: set[bytes] = set()

    @rule(target=running, scope=st.sampled_from(SCOPES), ids=st.lists(st.integers(0, 1), min_size=1, max_size=11))
    def admit(self, scope: PrefixScope, ids: list[int]) -> object:
        array = np.array(ids, dtype=np.int32)
        matched = self.cache.match(scope, array, self.cache.chain(ROOTS[scope], array))
        assert len(matched) == self.oracle.match(scope, ids)
        self.cache.acquire(matched)
        missing = -(-len(ids) // SIZE) - len(matched)
        if missing > self.cache.available_blocks:
            self.cache.release(matched)
            return multiple()
        before = {block for one in self.held for block in one.blocks}
        fresh = self.cache.allocate(missing)
        assert not before & set(fresh), "a block in use was handed out again"
        assert not set(matched) & set(fresh)
        one = Running(scope, ids, matched + fresh, len(matched))
        self.held.append(one)
        return one

    @rule(one=running, blocks=st.integers(1, 5))
    def publish(self, one: Running, blocks: int) -> None:
        if one not in self.held:
            return
        last = min(one.published + blocks, len(one.ids) // SIZE)
        array = np.array(one.ids, dtype=np.int32)
        chain = self.cache.chain(ROOTS[one.scope], array)
        done = self.cache.publish(one.scope, array, chain, one.blocks, one.published, last)
        assert done == max(last, one.published)
        self.oracle.publish(one.scope, one.ids, one.published, done)
        one.published = done

    @rule(one=consumes(running))
    def release(self, one: Running) -> None:
        if one in self.held:
            self.held.remove(one)
            self.cache.release(one.blocks)

    @rule()
    def reset(self) -> None:
        complete = self.cache.reset()
        assert complete == (not any(one.published for one in self.held))

    @invariant()
    def events_replayed_equal_the_index(self) -> None:
        for event in self.cache.take_events():
            if isinstance(event, BlocksStored):
                for block_hash in split_chain(event.hashes):
                    assert block_hash not in self.announced
                    self.announced.add(block_hash)
            elif isinstance(event, BlocksRemoved):
                for block_hash in split_chain(event.hashes):
                    self.announced.remove(block_hash)
            else:
                assert isinstance(event, CacheCleared)
                self.announced.clear()
        assert self.announced == self.cache.hashes()
        # What was evicted is forgotten by the oracle too; nothing else may be.
        self.oracle.keys = {key for key in self.oracle.keys if self._hash(key) in self.announced}
        assert len(self.oracle.keys) == len(self.announced)

    @invariant()
    def no_child_is_cached_without_its_parent(self) -> None:
        for scope, tokens in self.oracle.keys:
            assert len(tokens) == SIZE or (scope, tokens[:-SIZE]) in self.oracle.keys

    @invariant()
    def blocks_are_conserved(self) -> None:
        pool = self.cache.pool
        used = [block for one in self.held for block in one.blocks]
        assert pool.used_blocks == len(set(used))
        assert all(pool.references(block) == used.count(block) for block in range(BLOCKS))
        assert pool.free_blocks + pool.idle_blocks + len(set(used)) == BLOCKS
        assert pool.idle_blocks <= self.cache.indexed_blocks <= pool.idle_blocks + len(set(used))

    @staticmethod
    def _hash(key: tuple[PrefixScope, tuple[int, ...]]) -> bytes:
        scope, tokens = key
        return hash_blocks(ROOTS[scope], np.array(tokens, dtype=np.int32), SIZE)[-16:]


TestCacheLaws = CacheMachine.TestCase
TestCacheLaws.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
