"""Laws of a pool of segments: it is a pool of blocks, and routers know what it holds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router.protocol.block_hash import PrefixScope, hash_blocks
from router.protocol.events import BlocksRemoved, BlocksStored
from serve_app.cache.prefix.hot_prefixes import heats as block_heats
from serve_app.cache.prefix.prefix_cache import PrefixCache
from serve_app.replay.copies import heats, hottest
from serve_app.replay.pool import Holders, SegmentPool, TierStore
from serve_app.replay.setup import CacheTier

SIZE = 4
SCOPE = PrefixScope("m")
ROOT = SCOPE.root(b"laws")


@dataclass
class Tree:
    """A tree of segments: the parent of each, and its blocks."""

    parents: list[int]
    sizes: list[int]

    def path(self, segment: int) -> list[int]:
        """Return the segments from the root to this one."""
        path = [segment]
        while self.parents[path[0]] >= 0:
            path.insert(0, self.parents[path[0]])
        return path

    def tokens(self, path: list[int]) -> np.ndarray:
        """Return tokens that are the segments' own, and one that is nobody's."""
        parts = [np.repeat(segment * 100 + np.arange(self.sizes[segment]), SIZE) for segment in path]
        return np.concatenate([*parts, [-1]]).astype(np.int32)


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=9))
    return Tree([draw(st.integers(-1, place - 1)) for place in range(len(sizes))], sizes)


def held_blocks(pool: SegmentPool) -> int:
    return sum(pool.held.values())


def check_holders(pools: list[SegmentPool], sizes: list[int], holders: Holders) -> None:
    """The directory is what the pools hold, and nothing else."""
    whole: dict[int, int] = {}
    some: dict[int, dict[int, int]] = {}
    for pool in pools:
        for segment, blocks in pool.held.items():
            if segment < 0:
                continue
            if blocks == sizes[segment]:
                whole[segment] = whole.get(segment, 0) | pool.bit
            else:
                some.setdefault(segment, {})[pool.bit] = blocks
    assert (holders.whole, holders.some) == (whole, some)


Request = tuple[int, int, int]
"""The last segment of a prompt, the blocks of its answer, and of what another replica takes over, -1 for none."""


class Twins:
    """The product's cache and a pool of segments: requests come one after another, a second apart, to both."""

    def __init__(self, tree: Tree, capacity: int) -> None:
        self.tree, self.now_s, self.holders = tree, 0.0, Holders()
        self.cache = PrefixCache(capacity, SIZE, clock=lambda: self.now_s)
        self.pool = SegmentPool(capacity, tree.sizes, 1, self.holders)
        self.indexed: set[bytes] = set()

    def serve(self, request: Request) -> None:
        segment, answer_blocks, taken_blocks = request
        self.now_s += 1.0
        cache, pool, path = self.cache, self.pool, self.tree.path(segment)
        full = sum(self.tree.sizes[one] for one in path)
        prompt = self.tree.tokens(path)
        answer = np.repeat(1_000_000 + 10 * int(self.now_s) + np.arange(answer_blocks), SIZE)
        tokens = np.concatenate([prompt[:-1], answer, [-1]]).astype(np.int32)
        chain = hash_blocks(ROOT, tokens, SIZE)
        matched = cache.match(SCOPE, prompt, chain)
        count, blocks = pool.match(path)
        assert blocks == len(matched)

        needed = full + answer_blocks + 1 - blocks  # the last one is never full
        cache.acquire(matched)
        cache.hit(matched)
        every = [*matched, *cache.allocate(needed)]
        cache.publish(SCOPE, tokens, chain, every, len(matched), full + answer_blocks)
        cache.release(every)
        assert pool.fits(path, count, needed)
        pool.acquire(path, count)
        if count:
            pool.hit(path[count - 1], self.now_s)
        assert pool.take(needed)
        assert pool.publish(path, count, self.now_s) == (full - blocks, full)
        pool.keep(answer_blocks, path[-1], self.now_s)
        pool.release(path)
        pool.give(1)
        if 0 < taken_blocks <= full:
            cache.demote(cache.match(SCOPE, np.append(prompt[: taken_blocks * SIZE], -1).astype(np.int32), chain))
            pool.demote(path, taken_blocks)

    def check(self) -> None:
        """Both hold the same blocks."""
        cache, pool, tree, indexed = self.cache, self.pool, self.tree, self.indexed
        for event in cache.take_events():
            if isinstance(event, BlocksStored):
                indexed |= {event.hashes[place : place + 16] for place in range(0, len(event.hashes), 16)}
            elif isinstance(event, BlocksRemoved):
                indexed -= {event.hashes[place : place + 16] for place in range(0, len(event.hashes), 16)}
        assert held_blocks(pool) == len(indexed) == cache.pool.idle_blocks
        for one, size in enumerate(tree.sizes):
            chain = hash_blocks(ROOT, tree.tokens(tree.path(one)), SIZE)
            first = len(chain) // 16 - size
            here = sum(chain[16 * place : 16 * place + 16] in indexed for place in range(first, first + size))
            assert pool.held.get(one, 0) == here
        assert pool.free == cache.pool.free_blocks
        check_holders([pool], tree.sizes, self.holders)


def requests_over(tree: Tree) -> st.SearchStrategy[list[Request]]:
    taken = st.integers(-1, sum(tree.sizes))
    return st.lists(st.tuples(st.integers(0, len(tree.sizes) - 1), st.integers(0, 3), taken), max_size=30)


@settings(max_examples=200)
@given(trees(), st.data())
def test_segments_hit_and_are_evicted_as_their_blocks(tree: Tree, data: st.DataObject) -> None:
    """Requests find and leave in a pool of segments what they do in the product's cache, also what is handed on."""
    longest = max(sum(tree.sizes[one] for one in tree.path(segment)) for segment in range(len(tree.sizes)))
    twins = Twins(tree, data.draw(st.integers(longest + 4, longest + 16), "capacity"))
    for request in data.draw(requests_over(tree), "requests"):
        twins.serve(request)
        twins.check()


@settings(max_examples=100)
@given(trees(), st.data())
def test_segments_are_as_hot_as_their_last_blocks(tree: Tree, data: st.DataObject) -> None:
    """What a replica that joins or leaves copies first is the product's, by its own list."""
    twins = Twins(tree, 400)
    for request in data.draw(requests_over(tree), "requests"):
        twins.serve(request)
    twins.now_s += 100.0
    entries = list(twins.cache.index)
    product = block_heats(entries, twins.now_s)
    mine = heats(twins.pool, twins.now_s)
    for one in (segment for segment in twins.pool.held if segment >= 0):
        chain = hash_blocks(ROOT, tree.tokens(tree.path(one)), SIZE)
        entry = twins.cache.index.of_hash(chain[-16:])
        assert entry is not None and mine[one] == pytest.approx(product[entry.block])
    listed = [each for _, each, _ in hottest([twins.pool], twins.now_s)]
    assert len(listed) == len(twins.pool.held)
    for one in listed:
        parent = twins.pool.parents[one]
        assert parent is None or listed.index(parent) < listed.index(one)


@dataclass
class Held:
    """A sequence in a pool: its segments, those matched, and blocks of its own."""

    pool: SegmentPool
    path: list[int]
    count: int
    private: int
    published: bool = False
    grown: list[int] = field(default_factory=list)


class PoolLaws(RuleBasedStateMachine):
    """Sequences come, compute, grow and end in two pools at once, and replicas are cleared."""

    @initialize(tree=trees(), capacity=st.integers(6, 30), tier_blocks=st.integers(0, 12))
    def begin(self, tree: Tree, capacity: int, tier_blocks: int) -> None:
        """Make two empty pools over one tree, each with a tier."""
        self.tree, self.holders = tree, Holders()
        self.stores = [TierStore(CacheTier("host", 0, 1e5), tier_blocks) for _ in range(2)]
        self.pools = [
            SegmentPool(capacity, tree.sizes, 1 << number, self.holders, [self.stores[number]]) for number in range(2)
        ]
        self.sequences: list[Held] = []

    @rule(data=st.data(), which=st.integers(0, 1), more=st.integers(0, 4))
    def start(self, data: st.DataObject, which: int, more: int) -> None:
        """Start a sequence if there is room; ``fits`` says so truly."""
        pool = self.pools[which]
        path = self.tree.path(data.draw(st.integers(0, len(self.tree.sizes) - 1)))
        count, blocks = pool.match(path)
        needed = sum(self.tree.sizes[one] for one in path) + more - blocks
        fits = pool.fits(path, count, needed)
        pool.acquire(path, count)
        assert pool.take(needed) == fits
        if fits:
            self.sequences.append(Held(pool, path, count, needed))
        else:
            pool.release(path[:count])

    @precondition(lambda self: any(not one.published for one in self.sequences))
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        """A prompt is computed; copies of what another one has published meanwhile go back."""
        one = data.draw(st.sampled_from([one for one in self.sequences if not one.published]))
        used, own = one.pool.publish(one.path, one.count, 0.0)
        assert 0 <= used <= one.private and own == sum(self.tree.sizes[segment] for segment in one.path)
        one.private -= used
        one.published = True

    @precondition(lambda self: any(one.published for one in self.sequences))
    @rule(data=st.data(), blocks=st.integers(0, 6), rest=st.integers(0, 3))
    def end(self, data: st.DataObject, blocks: int, rest: int) -> None:
        """A sequence ends; its answer may be the beginning of a segment behind its prompt, or nobody's later."""
        one = data.draw(st.sampled_from([one for one in self.sequences if one.published]))
        children = [segment for segment, parent in enumerate(self.tree.parents) if parent == one.path[-1]]
        if children and blocks:
            segment = data.draw(st.sampled_from(children))
            most = min(blocks, self.tree.sizes[segment], one.pool.held.get(segment, 0) + one.private)
            before = one.pool.held.get(segment, 0)
            used = one.pool.grow(segment, most, one.path[-1], 0.0)
            assert used == max(most - before, 0)
            one.private -= used
            if used and segment not in one.pool.refs:
                assert next(reversed(one.pool.idle)) == segment
        kept = min(one.private, rest)
        one.pool.keep(kept, one.path[-1], 0.0)
        one.pool.release(one.path)
        one.pool.give(one.private - kept)
        self.sequences.remove(one)

    @rule(data=st.data(), which=st.integers(0, 1), blocks=st.integers(1, 20))
    def demote(self, data: st.DataObject, which: int, blocks: int) -> None:
        """Another replica takes over a part of a prompt."""
        self.pools[which].demote(self.tree.path(data.draw(st.integers(0, len(self.tree.sizes) - 1))), blocks)

    @rule(which=st.integers(0, 1))
    def clear(self, which: int) -> None:
        """A replica goes, and takes its sequences with it."""
        self.pools[which].clear()
        self.sequences = [one for one in self.sequences if one.pool is not self.pools[which]]

    @invariant()
    def conserved(self) -> None:
        """Every block is free, cached or a sequence's own; idle is what nobody uses; a parent outlives its children."""
        if not hasattr(self, "pools"):
            return
        check_holders(self.pools, self.tree.sizes, self.holders)
        for pool in self.pools:
            private = sum(one.private for one in self.sequences if one.pool is pool)
            assert pool.free >= 0
            assert pool.free + held_blocks(pool) + private == pool.capacity
            assert set(pool.idle) == set(pool.held) - set(pool.refs)
            assert pool.idle_blocks == sum(pool.held[segment] for segment in pool.idle)
            assert (
                pool.parents.keys() == pool.used_s.keys() == pool.held.keys() >= pool.hits.keys() | pool._demoted.keys()
            )
            assert pool._children == Counter(pool.parents.values())
            for rest in (one for one in pool.held if one < 0):
                assert pool.parents[rest] in pool.held and pool.held[rest] > 0
            for segment, blocks in pool.held.items():
                if segment < 0:
                    continue
                assert 0 < blocks <= self.tree.sizes[segment]
                parent = self.tree.parents[segment]
                assert parent < 0 or pool.held.get(parent) == self.tree.sizes[parent]
        for store in self.stores:
            assert store.used_blocks == sum(store.held.values()) <= store.capacity_blocks


TestPoolLaws = PoolLaws.TestCase
TestPoolLaws.settings = settings(max_examples=60, stateful_step_count=30)


def test_what_tiers_have_follows_what_the_pool_holds() -> None:
    """An evicted tail is found in the tier, behind the part that is left, at the tier's pace for each token."""
    store = TierStore(CacheTier("host", 0, 50.0), 10)
    pool = SegmentPool(6, [2, 4, 3], 1, Holders(), [store])
    pool.take(6)
    pool.publish([0, 1], 0, 0.0)
    pool.release([0, 1])
    pool.take(3)
    assert pool.match([0, 1]) == (2, 3)
    assert pool.loadable([0, 1], 2, 3) == (3, 1 / 50.0)
    assert pool.loadable([2], 0, 0) == (0, 0.0)
