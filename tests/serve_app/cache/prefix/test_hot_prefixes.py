"""A cache's report of itself: each block once, parents first, by kind and then by heat, as counted naively."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from router.protocol.block_hash import HASH_BYTES, PrefixScope, extend_chain, split_chain
from router.protocol.heat import HEAT_MEMORY_S
from serve_app.cache.prefix.hot_prefixes import KINDS, HotPrefixes, idle_heats, list_hot, within
from serve_app.cache.prefix.prefix_cache import PrefixCache
from tests.serve_app.cache.prefix.test_prefix_cache_laws import root_of, scope_of

SIZE = 2
SCOPES = {"a": PrefixScope("m", salt=b"a"), "b": PrefixScope("m", salt=b"b")}

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
            scope, array = scope_of(SCOPES[tenant], ids), np.array(ids, dtype=np.int32)
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
    assert set(told) == set(used.cache.index._by_hash)
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
