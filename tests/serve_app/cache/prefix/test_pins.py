"""Rules of pins: pinned blocks stay, within the budget, until the pin expires."""

import pytest

from serve_app.cache.prefix.pins import Pins
from serve_app.cache.prefix.prefix_cache import PrefixCache
from tests.serve_app.cache.prefix.test_prefix_cache import fill, tokens


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
