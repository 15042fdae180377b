"""Rules of pins: what is pinned stays, inside its budget, until its time is over."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.cache.prefix.pins import Pins
from serve_app.cache.prefix.prefix_cache import PrefixCache
from tests.serve_app.cache.prefix.test_prefix_cache import fill, hits, tokens


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def pinning(num_blocks: int, budget: int) -> tuple[PrefixCache, Clock]:
    clock = Clock()
    return PrefixCache(num_blocks, 1, pin_budget_blocks=budget, clock=clock), clock


def test_the_budget_counts_each_block_once() -> None:
    """Two pins that share a prefix cost their distinct blocks; what does not fit changes nothing."""
    cache, _ = pinning(16, 4)
    one, two = fill(cache, tokens(1, 2, 3)), fill(cache, tokens(1, 2, 4))
    assert cache.may_pin(cache.chain(b"r" * 16, tokens(1, 2, 3, 5)), 4, "default")
    assert cache.pin(b"one", one) == "pinned"
    assert cache.pin(b"two", two) == "pinned"
    assert cache.pins.blocks == 4
    assert not cache.may_pin(cache.chain(b"r" * 16, tokens(1, 2, 3, 5)), 4, "default")
    three = fill(cache, tokens(9))
    assert cache.pin(b"three", three) == "over_budget"
    assert (len(cache.pins), cache.pins.blocks) == (2, 4)
    assert cache.unpin(b"two")
    assert cache.pins.blocks == 3
    assert cache.pin(b"three", three) == "pinned"


@pytest.mark.parametrize("ttl_s", [300.0, 3600.0])
def test_a_pin_ends_with_its_ttl_after_the_last_read(ttl_s: float) -> None:
    """Every read of the whole prefix starts the time anew; a read of a part of it does not."""
    cache, clock = pinning(8, 4)
    blocks = fill(cache, tokens(1, 2, 3))
    cache.pin(b"k", blocks, ttl_s)
    cache.release(blocks)
    for _ in range(5):
        clock.now_s += ttl_s - 1
        cache.expire_pins()
        cache.acquire(blocks)
        cache.release(blocks)
    assert len(cache.pins) == 1
    clock.now_s += ttl_s - 1
    cache.acquire(blocks[:2])
    cache.release(blocks[:2])
    cache.expire_pins()
    assert len(cache.pins) == 1
    clock.now_s += 1
    cache.expire_pins()
    assert (len(cache.pins), cache.pins.blocks, cache.pool.idle_blocks) == (0, 0, 3)
    assert hits(cache, tokens(1, 2, 3, 4)) == blocks, "released, not forgotten"
    assert len(cache.allocate(8)) == 8


def test_a_pin_without_ttl_has_no_end_and_the_longer_ttl_wins() -> None:
    cache, clock = pinning(8, 4)
    blocks = fill(cache, tokens(1, 2))
    cache.pin(b"k", blocks, 300.0)
    assert cache.pin(b"k", blocks, 3600.0) == "present"
    assert cache.renew_pin(b"k", 300.0)
    clock.now_s += 3599
    cache.expire_pins()
    assert cache.renew_pin(b"k", None)
    clock.now_s += 1e9
    cache.expire_pins()
    assert list(cache.pins) == [b"k"]
    assert not cache.renew_pin(b"other", None)


def test_only_cached_blocks_can_be_pinned() -> None:
    cache, _ = pinning(8, 4)
    for blocks in ([], cache.allocate(1)):
        with pytest.raises(ValueError, match="indexed"):
            cache.pin(b"k", blocks)


def test_a_hit_does_not_look_at_pins_one_by_one() -> None:
    """A read of a long prefix under many pins renews exactly those that lie within it."""
    cache, clock = pinning(200, 150)
    ids = np.arange(100, dtype=np.int32)
    blocks = fill(cache, ids)
    for end in range(1, 101):
        cache.pin(str(end).encode(), blocks[:end], 10.0)
    clock.now_s += 9
    cache.acquire(blocks[:60])
    clock.now_s += 2
    cache.expire_pins()
    assert set(cache.pins) == {str(end).encode() for end in range(1, 61)}
    assert cache.pins.blocks == 60


def shared(budget: int, **weights: float) -> PrefixCache:
    """A large pool whose pin budget is shared among tenants."""
    return PrefixCache(64, 1, pin_budget_blocks=budget, shares=weights)


def test_a_share_of_the_budget_is_there_for_whoever_comes_later() -> None:
    """One tenant may use all of it while it is alone; the last it pinned goes first, and is cached still."""
    cache = shared(8, a=1, b=3)
    first, second, third = (fill(cache, tokens(head, 1, 2)[:size]) for head, size in ((1, 2), (2, 3), (3, 3)))
    for key, blocks in ((b"1", first), (b"2", second), (b"3", third)):
        assert cache.pin(key, blocks, tenant="a") == "pinned"
        cache.release(blocks)
    assert cache.pins.holdings() == {"a": 8}
    theirs = fill(cache, tokens(4, 1, 2))
    assert cache.may_pin(cache.chain(b"r" * 16, tokens(4, 1, 2)), 3, "b")
    assert cache.pin(b"4", theirs, tenant="b") == "pinned"
    assert (list(cache.pins), cache.recalled_pins) == ([b"1", b"2", b"4"], 1)
    assert hits(cache, tokens(3, 1, 2, 9)) == third, "no longer pinned, but cached"
    more = fill(cache, tokens(5, 1, 2))
    assert cache.pin(b"5", more, tenant="b") == "pinned"
    assert cache.pins.holdings() == {"a": 2, "b": 6}
    for tenant in ("a", "b", "c"):
        assert cache.pin(b"6", fill(cache, tokens(6)), tenant=tenant) == "over_budget"
        assert not cache.may_pin(cache.chain(b"r" * 16, tokens(6)), 1, tenant)
    assert list(cache.pins) == [b"1", b"4", b"5"], "what is within a share stays"


def test_a_tenant_that_nobody_named_has_no_share() -> None:
    """Among several tenants it borrows; where there is one tenant or none, the budget is everybody's."""
    cache = shared(4, a=1, b=1)
    assert cache.pin(b"other", fill(cache, tokens(1, 2, 3)), tenant="other") == "pinned"
    assert cache.pin(b"a", fill(cache, tokens(2, 2)), tenant="a") == "pinned"
    assert list(cache.pins) == [b"a"]
    for weights in ({}, {"a": 2.0}):
        pins = Pins(4, weights)
        assert pins.add(b"a", [1, 2, 3], None, 0.0, "a") == "pinned"
        assert pins.recall([4, 5], "a") is None


@given(
    weights=st.dictionaries(st.sampled_from("abc"), st.floats(0.1, 10), min_size=2),
    budget=st.integers(0, 20),
    asked=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 8), st.integers(0, 3)), max_size=40),
)
def test_what_is_within_a_share_is_never_refused_nor_recalled(
    weights: dict[str, float], budget: int, asked: list[tuple[str, int, int]]
) -> None:
    """Whoever asks for whatever in any order; prefixes of four families overlap within and between tenants.

    docs/caching.md
    """
    cache = PrefixCache(256, 1, pin_budget_blocks=budget, shares=weights)
    shares = {name: int(budget * weight / sum(weights.values())) for name, weight in weights.items()}
    for number, (tenant, length, family) in enumerate(asked):
        blocks = fill(cache, tokens(family, *range(length - 1)))
        before = cache.pins.holdings()
        outcome = cache.pin(str(number).encode(), blocks, tenant=tenant)
        cache.release(blocks)
        after = cache.pins.holdings()
        assert cache.pins.blocks <= budget
        for name, held in before.items():
            if held <= shares.get(name, 0):
                assert after.get(name, 0) >= held, f"{name} lost what was within its share"
        if outcome == "over_budget":
            assert before == after
            assert before.get(tenant, 0) + length > shares.get(tenant, 0)
        assert sum(after.values()) >= cache.pins.blocks
    for key in cache.pins:
        cache.unpin(key)
    assert (cache.pins.holdings(), cache.pins.blocks, cache.pool.used_blocks) == ({}, 0, 0)
