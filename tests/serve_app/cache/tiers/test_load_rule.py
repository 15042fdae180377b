"""The rule for loads from a lower tier: they must be faster than computing."""

import copy

import pytest

from serve_app.cache.tiers.load_rule import LoadRule

RATES = {"host": 4e9, "disk": 5e8}


def test_load_when_it_is_faster_than_computing() -> None:
    """At measured rates of 1 MB/s and 1,000 tokens/s a megabyte is worth 1,000 tokens, not 900. (docs: caching)"""
    rule = LoadRule(1.0, RATES)
    for _ in range(200):
        rule.observe("disk", 100_000, 0.1)
    assert rule.bytes_per_s("disk") == pytest.approx(1e6, rel=0.01)
    assert rule.worthwhile({"disk": 1_000_000}, 1100, 1000.0)
    assert rule.worthwhile({"disk": 800_000, "host": 400_000_000}, 1000, 1000.0)
    assert not copy.deepcopy(rule).worthwhile({"disk": 800_000, "host": 1_600_000_000}, 1000, 1000.0)
    assert not rule.worthwhile({"disk": 1_000_000}, 900, 1000.0)


def test_the_ratio_asks_for_a_gain_or_switches_loading_off() -> None:
    """Until computing has been measured, everything is loaded."""
    half, off = LoadRule(0.5, RATES), LoadRule(0.0, RATES)
    assert half.worthwhile({"host": 4_000_000_000}, 2100, 1000.0)
    assert not half.worthwhile({"host": 4_000_000_000}, 1900, 1000.0)
    assert not off.worthwhile({"host": 1}, 1_000_000, 0.0)
    assert half.worthwhile({"disk": 1 << 40}, 16, 0.0)


def test_a_tier_that_was_slow_once_is_tried_again() -> None:
    rule = LoadRule(1.0, RATES)
    rule.observe("disk", 1000, 10.0)
    refusals = 0
    while not rule.worthwhile({"disk": 10_000_000}, 100, 1000.0):
        refusals += 1
    assert 1 < refusals < 1000
