"""Rules of the tenants' shares: which tenant loses blocks, which may borrow, and the cost of finding out."""

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.protocol.block_hash import PrefixScope
from serve_app.cache.prefix.prefix_cache import PrefixCache
from serve_app.cache.prefix.quota import CACHE_ACTIVE_S, GUARD_S, PUBLIC, Account, Quota


class Bench:
    """A cache of one-token blocks, with prompts named by tenant and number."""

    def __init__(self, blocks: int, **shares: float) -> None:
        self.now_s = 0.0
        self.cache = PrefixCache(blocks, 1, shares=shares, clock=lambda: self.now_s)

    def fill(self, tenant: str, blocks: int, number: int = 0, *, keep: bool = False, public: int = 0) -> list[int]:
        """Publish a prompt of ``tenant`` that starts with ``public`` public blocks; release it unless ``keep``."""
        scope = PrefixScope("m", salt=tenant.encode(), public_blocks=public)
        ids = np.arange(blocks, dtype=np.int32) + 1000 * number
        ids[:public] = np.arange(public)
        root = scope.private.root(b"k")
        chain = self.cache.prompt_chain(scope, scope.public.root(b"k") + root if public else root, ids)
        matched = self.cache.match(scope, ids, chain)
        self.cache.acquire(matched)
        taken = matched + self.cache.allocate(blocks - len(matched), tenant)
        self.cache.publish(scope, ids, chain, taken, len(matched), blocks)
        if not keep:
            self.cache.release(taken)
        return taken

    def held(self, tenant: str) -> int:
        return self.cache.quota.holdings().get(tenant, 0)


def test_a_block_demoted_twice_and_evicted_is_its_next_owners_alone() -> None:
    """No entry stays in a former owner's queue: it would take the block from its current owner."""
    bench = Bench(8)
    moved = bench.fill("a", 1, 0)
    others = [bench.fill("a", 1, number)[0] for number in range(1, 8)]
    for _ in range(2):
        assert bench.cache.demote(moved) == 1
    assert bench.fill("b", 1) == moved
    assert bench.cache.demote(moved) == 1
    assert bench.cache.allocate(1, "c") == others[:1]


def test_a_flood_does_not_evict_a_public_prompt() -> None:
    """A public prompt is on no tenant's account and has a share of its own. (docs: caching)"""
    bench = Bench(24, flood=1.0, small=1.0)
    shared = bench.fill("flood", 5, 1, public=4)[:4]
    assert (bench.held("flood"), bench.held(PUBLIC)) == (1, 4)
    for number in range(2, 30):
        bench.fill("flood", 3, number)
    assert bench.held(PUBLIC) == 4
    assert bench.fill("small", 6, 50, public=4)[:4] == shared
    assert (bench.held("small"), bench.held(PUBLIC), bench.held("flood")) == (2, 4, 18)
    assert bench.cache.quota.shares.fraction("small") == 0.5, "a public prompt narrows nobody's share"


@pytest.mark.parametrize("read", [True, False])
def test_a_public_prompt_has_a_share_as_long_as_it_is_read(read: bool) -> None:
    """Its reads count as its requests: nobody publishes it anew. No tenant's own block follows it."""
    bench = Bench(24, flood=1.0, small=1.0)
    bench.fill("flood", 4, 1, public=4)
    for number in range(4):
        bench.now_s += CACHE_ACTIVE_S / 2
        bench.fill("small", 4, 50 + number, public=4 * read)
    for number in range(2, 30):
        bench.fill("flood", 3, number)
    assert bench.held(PUBLIC) == (4 if read else 0)


def test_with_several_tenants_configured_a_lone_one_counts_as_one_of_two() -> None:
    """This keeps a share ready for a new tenant; if only one tenant exists, everything is its own."""
    assert Bench(8, a=1.0, b=1.0).cache.quota.shares.fraction("a") == 0.5
    assert Bench(8).cache.quota.shares.fraction("a") == 1.0
    for weight in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="share"):
            Quota(4, {"a": weight}, lambda: 0.0)


def test_tenants_that_left_leave_nothing_behind() -> None:
    """After a thousand passing tenants, accounts are in proportion to the tenants that hold blocks."""
    bench = Bench(64)
    for number in range(1000):
        bench.fill(f"t{number}", 1)
        bench.now_s += 100.0
    assert len(bench.cache.quota._accounts) <= 64 + CACHE_ACTIVE_S / 100 + 1


def naive_protected(quota: Quota, tenant: str) -> int:
    """Look at every account."""
    since_s, kept = quota.clock() - GUARD_S, 0
    for account in quota.all():
        if account.used_s >= since_s and account.tenant != tenant:
            within = int(quota._total_blocks * naive_fraction(quota, account.tenant)) - (account.held - account.idle)
            kept += min(account.idle, max(0, within))
    return kept


def naive_fraction(quota: Quota, tenant: str) -> float:
    """Look at every account."""
    active = [account for account in quota.all() if account.used_s >= quota._active_since_s()]
    others = sum(account.weight for account in active if account.tenant not in (tenant, PUBLIC))
    weight = quota.shares._weights.get(tenant, 1.0)
    return weight / (weight + (others or float(len(quota.shares._weights) > 1)))


def naive_furthest(quota: Quota) -> str | None:
    """Look at every account: the first of those with the largest holdings by weight."""
    since_s, evictable = quota._active_since_s(), [account for account in quota.all() if account.queue]
    return max(evictable, key=lambda account: account.excess(since_s)).tenant if evictable else None


ACTIONS = st.one_of(
    st.tuples(st.just("fill"), st.sampled_from("abcd"), st.integers(1, 6), st.booleans()),
    st.tuples(st.just("release"), st.integers(0, 9)),
    st.tuples(
        st.just("touch"), st.sampled_from("abcde"), st.sampled_from([0.0, 30.0, CACHE_ACTIVE_S, CACHE_ACTIVE_S + 50.0])
    ),
    st.tuples(st.just("pass"), st.sampled_from([1.0, 100.0, CACHE_ACTIVE_S])),
    st.tuples(st.just("weigh"), st.sampled_from("abcd"), st.sampled_from([0.5, 1.0, 3.0])),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(ACTIONS, max_size=40))
@example(
    [
        ("weigh", "a", 3.0),
        ("fill", "a", 1, False),
        ("fill", "a", 2, False),
        ("fill", "b", 1, False),
        ("weigh", "b", 3.0),
    ]
)
def test_shares_are_those_that_a_look_at_every_tenant_finds(actions: list[Any]) -> None:
    """In any order of requests, evictions, pauses and new weights."""
    bench = Bench(24)
    quota, kept = bench.cache.quota, list[list[int]]()
    for number, (action, *how) in enumerate(actions):
        if action == "fill":
            tenant, blocks, keep = how
            if blocks <= 24 - sum(map(len, kept)):
                taken = bench.fill(tenant, blocks, number % 7, keep=True, public=blocks if number % 5 == 0 else 0)
                kept.append(taken) if keep else bench.cache.release(taken)
        elif action == "release" and kept:
            bench.cache.release(kept.pop(how[0] % len(kept)))
        elif action == "touch":
            quota.touch(how[0], how[1])
        elif action == "pass":
            bench.now_s += how[0]
        elif action == "weigh":
            quota.set_weights({how[0]: how[1]})
        furthest = quota.furthest()
        assert (furthest.tenant if furthest else None) == naive_furthest(quota)
        for tenant in ("a", "d", "never seen", PUBLIC):
            assert quota.shares.fraction(tenant) == naive_fraction(quota, tenant)
            assert quota.protected(tenant) == naive_protected(quota, tenant)
    assert len(quota._ranking) <= 2 * 6 + 64


def test_an_eviction_does_not_look_at_every_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(500)
    for number in range(500):
        bench.fill(f"t{number}", 1, number)
    bench.fill("flood", 3, 1000)
    looks = 0
    excess = Account.excess

    def counted(account: Account[Any], since_s: float) -> float:
        nonlocal looks
        looks += 1
        return excess(account, since_s)

    monkeypatch.setattr(Account, "excess", counted)
    bench.fill("flood", 100, 1001)
    assert looks < 1000
