"""Rules of the prefix cache: hits, evictions, announcements, pins, hot prefixes, and the pool of blocks."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.protocol.block_hash import (
    HASH_BYTES,
    ChainHasher,
    PrefixScope,
    TokenArray,
    extend_chain,
    hash_blocks,
    split_chain,
)
from router.protocol.events import BlocksRemoved, BlocksStored
from router.protocol.samples import HEAT_MEMORY_S
from serve_app.cache.prefix.blocks import BlockPool, PoolExhausted
from serve_app.cache.prefix.hot_prefixes import KINDS, HotPrefixes, idle_heats, list_hot, within
from serve_app.cache.prefix.pins import Pins
from serve_app.cache.prefix.prefix_cache import PrefixCache
from tests.serve_app.cache.prefix.test_prefix_cache_laws import root_of, scope_of

SCOPE = PrefixScope("m", salt=b"tenant a")
ROOT = SCOPE.root(b"s")


def tokens(*values: int) -> TokenArray:
    return np.array(values, dtype=np.int32)


def fill(cache: PrefixCache, ids: TokenArray, scope: PrefixScope = SCOPE, root: bytes = ROOT) -> list[int]:
    """Compute and publish a prompt as a sequence would; the blocks stay in use."""
    chain = cache.prompt_chain(SCOPE, root, ids)
    matched = cache.match(scope, ids, chain)
    cache.acquire(matched)
    blocks = matched + cache.allocate(-(-len(ids) // cache.block_size) - len(matched))
    cache.publish(scope, ids, chain, blocks, len(matched), len(ids) // cache.block_size)
    return blocks


def hits(cache: PrefixCache, ids: TokenArray, scope: PrefixScope = SCOPE, root: bytes = ROOT) -> list[int]:
    return cache.match(scope, ids, cache.prompt_chain(SCOPE, root, ids))


def constant_chain(parent: bytes, token_ids: TokenArray, block_size: int) -> bytes:
    """The worst possible hash: the i-th block of anything hashes to i."""
    return b"".join(i.to_bytes(HASH_BYTES, "little") for i in range(len(token_ids) // block_size))


def orphan_chain(parent: bytes, token_ids: TokenArray, block_size: int) -> bytes:
    """A hash of a block's own tokens alone: equal blocks under different prefixes collide."""
    return b"".join(
        hash_blocks(bytes(16), token_ids[i : i + block_size], block_size)
        for i in range(0, len(token_ids) - block_size + 1, block_size)
    )


SCOPES = (
    SCOPE,
    PrefixScope("m", salt=b"tenant b"),
    PrefixScope("m", lora="adapter", salt=b"tenant a"),
    PrefixScope("n", salt=b"tenant a"),
)
REQUESTS = st.lists(
    st.tuples(st.sampled_from(SCOPES), st.lists(st.integers(0, 1), min_size=1, max_size=9), st.integers(0, 2)),
    max_size=8,
)


@given(REQUESTS, st.sampled_from([constant_chain, orphan_chain]))
def test_no_collision_gives_a_block_of_other_tokens_or_of_another_scope(
    asked: list[tuple[PrefixScope, list[int], int]], hash_chain: ChainHasher
) -> None:
    """Requests have any scopes and any number of public blocks, while different contents have equal hashes.

    No hit, no overwrite, no shared block once it is computed, and the first owner keeps its blocks. (docs: caching)
    """
    cache = PrefixCache(64, 2, hash_chain=hash_chain)
    content: dict[int, tuple[PrefixScope, list[int]]] = {}
    for scope, ids, public in asked:
        scope = replace(scope, public_blocks=min(public, len(ids) // 2))
        for i, block in enumerate(hits(cache, tokens(*ids), scope)):
            assert content[block] == (scope.at(i), ids[: 2 * i + 2])
        for i, block in enumerate(fill(cache, tokens(*ids), scope)[: len(ids) // 2]):
            if cache.index.of_block(block) is not None:
                own = scope.at(i), ids[: 2 * i + 2]
                assert content.setdefault(block, own) == own
        assert all(block in cache.index for block in content)


def test_eviction_takes_the_tail_before_the_head_and_the_oldest_first() -> None:
    """Leaf-first LRU: two prefixes lose their blocks tail first, the older first; events name parents first."""
    cache = PrefixCache(4, 1)
    second, first = fill(cache, tokens(3, 4)), fill(cache, tokens(1, 2))
    assert cache.take_events()[1] == BlocksStored(cache.prompt_chain(SCOPE, ROOT, tokens(1, 2)))
    cache.release(second)
    cache.release(first)
    assert hits(cache, tokens(3, 4, 0)) == second
    cache.acquire(second)
    cache.release(second)
    order = []
    for _ in range(4):
        order += cache.allocate(1)
    assert order == [first[1], first[0], second[1], second[0]]
    removed = b"".join(e.hashes for e in cache.take_events() if isinstance(e, BlocksRemoved))
    parents, children = cache.prompt_chain(SCOPE, ROOT, tokens(1, 2)), cache.prompt_chain(SCOPE, ROOT, tokens(3, 4))
    assert removed == parents[16:] + parents[:16] + children[16:] + children[:16]


@given(st.lists(st.integers(0, 6), max_size=4), st.integers(1, 6))
def test_evicted_blocks_that_were_reused_are_counted_apart(reused: list[int], evicted: int) -> None:
    """A block was reused if a request's matched prefix ended there or further on; a new block never was."""
    cache, ids = PrefixCache(6, 2), np.arange(12, dtype=np.int32)
    blocks = fill(cache, ids)
    cache.release(blocks)
    for matched in reused:
        cache.hit(blocks[:matched])
    cache.release(cache.allocate(evicted))
    assert cache.evicted_blocks == evicted
    assert cache.evicted_reused_blocks == max(0, max(reused, default=0) - (6 - evicted))


def test_switched_off_nothing_is_hashed_or_indexed() -> None:
    def explode(parent: bytes, token_ids: TokenArray, block_size: int) -> bytes:
        raise AssertionError("hashed")

    cache = PrefixCache(4, 1, enabled=False, hash_chain=explode)
    blocks = fill(cache, tokens(1, 2, 3))
    cache.release(blocks)
    assert cache.take_events() == ()
    assert (cache.pool.free_blocks, len(cache.index)) == (4, 0)
    assert hits(cache, tokens(1, 2, 3)) == []


def test_a_touched_prefix_is_evicted_last_without_its_tail() -> None:
    """Three prefixes are released in turn; a touch on part of the first keeps that part, but not its unused tail."""
    cache = PrefixCache(9, 1)
    for first in (1, 4, 7):
        cache.release(fill(cache, tokens(first, first + 1, first + 2, 0)[:3]))
    touched = cache.prompt_chain(SCOPE, ROOT, tokens(1, 2))
    cache.touch(touched, 2)
    cache.take_events()
    cache.release(cache.allocate(7))
    gone = b"".join(event.hashes for event in cache.take_events() if isinstance(event, BlocksRemoved))
    left = {bytes(entry.block_hash) for entry in cache.index}
    assert left <= set(split_chain(touched)) and len(left) == 2, gone


def test_a_demoted_tail_is_evicted_first_and_a_shared_part_is_not() -> None:
    """It was used last; blocks in the middle of a chain are not demoted, and a hit ends a demotion."""
    cache = PrefixCache(10, 1)
    older = fill(cache, tokens(7, 8))
    cache.release(older)
    left, right, again = fill(cache, tokens(1, 2, 3, 4)), fill(cache, tokens(1, 5)), fill(cache, tokens(6, 9))
    for blocks in (right, left, again):
        cache.release(blocks)
    assert cache.demote(left[:3]) == 0
    assert (cache.demote(again), cache.demote(left)) == (2, 3)
    cache.acquire(again)
    cache.release(again)
    cache.take_events()
    cache.release(cache.allocate(4))
    (event,) = cache.take_events()
    chain = cache.prompt_chain(SCOPE, ROOT, tokens(1, 2, 3, 4))
    assert event == BlocksRemoved(chain[48:] + chain[32:48] + chain[16:32])
    assert hits(cache, tokens(7, 8, 0)) == older
    cache.release(cache.allocate(6))
    for ids, blocks in (((7, 8, 0), []), ((1, 5, 0), right), ((6, 9, 0), again)):
        assert hits(cache, tokens(*ids)) == blocks


def test_evicted_blocks_are_handed_over_in_place() -> None:
    """The tiers' hook is called before a block is used again: demoted blocks first, children first."""
    cache = PrefixCache(6, 1)
    old, new, held = fill(cache, tokens(1, 2)), fill(cache, tokens(3, 4)), fill(cache, tokens(5, 6))
    cache.release(old)
    cache.release(new)
    assert cache.demote(new) == 2
    seen: list[int] = []
    cache.on_evict = lambda evicted: seen.extend(entry.block for entry in evicted)
    assert sorted(cache.allocate(3)) == sorted(seen)
    assert seen == [new[1], new[0], old[1]]
    cache.release(held)
    cache.reset()
    assert len(seen) == 3, "a reset hands nothing over"


def test_blocks_are_handed_out_as_neighbours_and_never_twice() -> None:
    """Blocks come in order from a fresh pool, and again after a release tail first; a too large request takes none."""
    pool = BlockPool(8)
    blocks = pool.take(5)
    assert blocks == [0, 1, 2, 3, 4]
    with pytest.raises(PoolExhausted):
        pool.take(4)
    for block in reversed(blocks):
        pool.release(block, keep=False)
    assert pool.take(8) == list(range(8))


def test_a_block_cannot_be_released_twice() -> None:
    pool = BlockPool(1)
    (block,) = pool.take(1)
    pool.release(block, keep=True)
    with pytest.raises(ValueError, match="not in use"):
        pool.release(block, keep=True)
    pool.free_idle(block)
    with pytest.raises(KeyError):
        pool.free_idle(block)


SIZE = 2
HOT_SCOPES = {"a": PrefixScope("m", salt=b"a"), "b": PrefixScope("m", salt=b"b")}

Prompts = st.lists(
    st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 1), min_size=SIZE, max_size=12), st.integers(0, 900)),
    min_size=1,
    max_size=12,
)
"""Requests: tenant, tokens, seconds since the previous one."""


class Used:
    """A cache after some requests, with a naive record of the times when each block's prefix was new or matched."""

    def __init__(self, requests: list[tuple[str, list[int], int]], pinned: int = 0) -> None:
        self.now_s = 0.0
        self.cache = PrefixCache(256, SIZE, pin_budget_blocks=256, clock=lambda: self.now_s)
        self.uses: list[tuple[bytes, float, float]] = []  # chain, hits, time
        for number, (tenant, ids, after_s) in enumerate(requests):
            self.now_s += after_s
            scope, array = scope_of(HOT_SCOPES[tenant], ids), np.array(ids, dtype=np.int32)
            chain = extend_chain(root_of(scope), scope.public_blocks, array, SIZE)
            matched = self.cache.match(scope, array, chain)
            self.cache.acquire(matched)
            self.cache.hit(matched)
            if matched:
                self.uses.append((chain[: len(matched) * HASH_BYTES], 1.0, self.now_s))
            full = len(chain) // HASH_BYTES
            blocks = matched + self.cache.allocate(-(-len(ids) // SIZE) - len(matched), tenant)
            before = {entry.block_hash for entry in self.cache.index}
            self.cache.publish(scope, array, chain, blocks, len(matched), full)
            for i, block_hash in enumerate(split_chain(chain)):
                if block_hash not in before:
                    self.uses.append((chain[: (i + 1) * HASH_BYTES], 0.0, self.now_s))
            if number < pinned and full:
                self.cache.pin(b"%d" % number, blocks[:full], 1000.0, tenant=tenant)
            self.cache.release(blocks)
        self.chains = {use[0] for use in self.uses}

    def heat(self, chain: bytes) -> float:
        uses = [use for use in self.uses if use[0].startswith(chain)]
        hits = sum(count * math.exp((at_s - self.now_s) / HEAT_MEMORY_S) for _, count, at_s in uses)
        return hits + math.exp((max(use[2] for use in uses) - self.now_s) / HEAT_MEMORY_S)

    def hot(self) -> HotPrefixes:
        return list_hot(list(self.cache.index), self.cache.pins.soonest_first(), self.now_s)


@given(Prompts, st.integers(0, 3))
def test_each_block_once_parents_first_by_kind_and_heat(
    requests: list[tuple[str, list[int], int]], pinned: int
) -> None:
    """The cache holds each block with these tokens, this scope, and this owner. (docs: failures)"""
    used = Used(requests, pinned)
    hot = used.hot()
    told = [block_hash for run in hot.runs for block_hash in split_chain(run.hashes)]
    assert len(told) == len(set(told))
    assert set(told) == {entry.block_hash for entry in used.cache.index}
    assert all(run.parent is None or run.parent < number for number, run in enumerate(hot.runs))
    keys = [(KINDS.index(run.kind), -run.heat) for run in hot.runs]
    assert keys == sorted(keys)
    for number, run in enumerate(hot.runs):
        prefix = hot.prefix(number)
        assert math.isclose(run.heat, used.heat(prefix.chain), rel_tol=1e-9)
        root = root_of(prefix.scope)
        assert prefix.chain == extend_chain(root, prefix.scope.public_blocks, prefix.token_ids, SIZE)
        matched = used.cache.match(prefix.scope, np.append(prefix.token_ids, np.int32(0)), prefix.chain)
        assert len(matched) * SIZE == len(prefix.token_ids)
        assert used.cache.quota.tenant_of(matched[-1]) == prefix.tenant
        kind = "save" if matched[-1] in used.cache.pins.counts() else "public" if "public" in run.tenant else "prefix"
        assert run.kind == kind
    assert {save.key for save in hot.saves} == set(used.cache.pins)
    for save in hot.saves:
        pin = next(pin for pin in used.cache.pins.soonest_first() if pin.key == save.key)
        assert len(hot.prefix(save.run).chain) // HASH_BYTES == len(pin.blocks)
        assert math.isclose(save.unread_s, 1000.0 - (pin.expires_s - used.now_s), abs_tol=1e-6)


@given(Prompts, st.integers(0, 3), st.integers(0, 40))
def test_a_beginning_is_a_list_of_its_own(
    requests: list[tuple[str, list[int], int]], pinned: int, most_blocks: int
) -> None:
    """It has as many blocks as allowed, or all, and every parent. Idle heats are those of the blocks, ascending."""
    used = Used(requests, pinned)
    hot = used.hot()
    part = within(hot, most_blocks)
    assert sum(run.blocks for run in part.runs) == min(most_blocks, len(used.cache.index))
    for number in range(len(part.runs)):
        assert part.prefix(number).chain == hot.prefix(number).chain[: len(part.prefix(number).chain)]
    entries = list(used.cache.index)
    heats = np.frombuffer(idle_heats(entries, [entry.block for entry in entries], used.now_s), "<f4")
    assert np.allclose(heats, sorted(used.heat(chain) for chain in used.chains), rtol=1e-5)


def test_a_pin_without_ttl_has_no_end_and_the_longer_ttl_wins() -> None:
    now_s = 1000.0
    cache = PrefixCache(8, 1, pin_budget_blocks=4, clock=lambda: now_s)
    blocks = fill(cache, tokens(1, 2))
    cache.pin(b"k", blocks, 300.0)
    assert cache.pin(b"k", blocks, 3600.0) == "present"
    assert cache.pins.renew(b"k", 300.0, now_s)
    now_s += 3599
    cache.expire_pins()
    assert cache.pins.renew(b"k", None, now_s)
    now_s += 1e9
    cache.expire_pins()
    assert list(cache.pins) == [b"k"]
    assert not cache.pins.renew(b"other", None, now_s)


def test_only_cached_blocks_can_be_pinned() -> None:
    cache = PrefixCache(8, 1, pin_budget_blocks=4)
    for blocks in ([], cache.allocate(1)):
        with pytest.raises(ValueError, match="indexed"):
            cache.pin(b"k", blocks)


def test_a_tenant_that_nobody_named_has_no_share() -> None:
    """Beside others it borrows, and returns its latest pins first; a lone tenant, or none, has the whole budget."""
    cache = PrefixCache(64, 1, pin_budget_blocks=4, shares={"a": 1.0, "b": 1.0})
    for key, ids in ((b"first", tokens(1, 2)), (b"last", tokens(3))):
        assert cache.pin(key, fill(cache, ids), tenant="other") == "pinned"
    assert cache.pin(b"a", fill(cache, tokens(2, 2)), tenant="a") == "pinned"
    assert list(cache.pins) == [b"first", b"a"]
    assert cache.pin(b"more", fill(cache, tokens(4)), tenant="a") == "over_budget", "it already has its share"
    assert list(cache.pins) == [b"first", b"a"]
    for weights in ({}, {"a": 2.0}):
        pins = Pins(4, weights)
        assert pins.add(b"a", [1, 2, 3], None, 0.0, "a") == "pinned"
        assert pins.recall([4, 5], "a") is None
