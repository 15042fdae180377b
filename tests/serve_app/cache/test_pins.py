"""Rules of pins: what is pinned stays, inside its budget, until its time is over."""

from __future__ import annotations

import numpy as np
import pytest

from serve_app.cache.block_pool import PoolExhausted
from serve_app.cache.prefix_cache import PrefixCache
from tests.serve_app.cache.test_prefix_cache import fill, hits, tokens


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def pinning(num_blocks: int, budget: int) -> tuple[PrefixCache, Clock]:
    clock = Clock()
    return PrefixCache(num_blocks, 1, pin_budget_blocks=budget, clock=clock), clock


def test_a_pinned_prefix_survives_any_pressure() -> None:
    """Everything else is evicted around it; a block more is refused instead."""
    cache, _ = pinning(6, 3)
    blocks = fill(cache, tokens(1, 2, 3))
    assert cache.pin(b"k", blocks) == "pinned"
    cache.release(blocks)
    for number in range(20):
        cache.release(fill(cache, tokens(100 + number, 1, 2)))
    with pytest.raises(PoolExhausted):
        cache.allocate(4)
    assert hits(cache, tokens(1, 2, 3, 4)) == blocks
    assert cache.pinned_idle_blocks() == 3


def test_the_budget_counts_each_block_once() -> None:
    """Two pins that share a prefix cost their distinct blocks; what does not fit changes nothing."""
    cache, _ = pinning(16, 4)
    one, two = fill(cache, tokens(1, 2, 3)), fill(cache, tokens(1, 2, 4))
    assert cache.unpinned_blocks(cache.chain(b"r" * 16, tokens(1, 2)), 2) == 2
    assert cache.pin(b"one", one) == "pinned"
    assert cache.pin(b"two", two) == "pinned"
    assert cache.pins.blocks == 4
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


def test_an_ended_pin_is_not_ended_again_under_the_same_key() -> None:
    """The first pin's time must not end the second one, made under its key later."""
    cache, clock = pinning(8, 4)
    blocks = fill(cache, tokens(1, 2))
    cache.pin(b"k", blocks, 10.0)
    cache.unpin(b"k")
    clock.now_s += 5
    cache.pin(b"k", blocks, 10.0)
    clock.now_s += 6
    cache.expire_pins()
    assert len(cache.pins) == 1
    clock.now_s += 4
    cache.expire_pins()
    assert len(cache.pins) == 0
    assert cache.pins.next_expiry_s is None


def test_a_reset_releases_pins() -> None:
    cache, _ = pinning(8, 4)
    blocks = fill(cache, tokens(1, 2))
    cache.pin(b"k", blocks)
    cache.release(blocks)
    assert cache.reset()
    assert (cache.pool.free_blocks, cache.pins.blocks, cache.indexed_blocks) == (8, 0, 0)


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
