"""Rules of the prefix cache: hits, evictions, announcements."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from router.protocol.block_hash import HASH_BYTES, ChainHasher, PrefixScope, TokenArray, hash_blocks, split_chain
from router.protocol.events import BlocksRemoved, BlocksStored
from serve_app.cache.prefix.prefix_cache import PrefixCache

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
