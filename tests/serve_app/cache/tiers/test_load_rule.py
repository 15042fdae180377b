"""The rule for loads from a lower tier: they must be faster than computing."""

import pytest

from serve_app.cache.tiers.tier import LoadRule

HOST, DISK = 4e9, 5e8


def test_load_when_it_is_faster_than_computing() -> None:
    """At measured rates of 1 MB/s and 1,000 tokens/s a megabyte is worth 1,000 tokens, not 900. (docs: caching)"""
    rule = LoadRule(1.0, DISK)
    for _ in range(200):
        rule.observe(100_000, 0.1)
    assert rule.bytes_per_s == pytest.approx(1e6, rel=0.01)
    assert rule.worthwhile(1_000_000, 1100, 1000.0)
    assert not rule.worthwhile(1_000_000, 900, 1000.0)


def test_the_ratio_asks_for_a_gain_or_switches_loading_off() -> None:
    """Until computing has been measured, everything is loaded."""
    half, off = LoadRule(0.5, HOST), LoadRule(0.0, HOST)
    assert half.worthwhile(4_000_000_000, 2100, 1000.0)
    assert not half.worthwhile(4_000_000_000, 1900, 1000.0)
    assert not off.worthwhile(1, 1_000_000, 0.0)
    assert half.worthwhile(1 << 40, 16, 0.0)


def test_a_tier_that_was_slow_once_is_tried_again() -> None:
    rule = LoadRule(1.0, DISK)
    rule.observe(1000, 10.0)
    refusals = 0
    while not rule.worthwhile(10_000_000, 100, 1000.0):
        refusals += 1
    assert 1 < refusals < 1000
