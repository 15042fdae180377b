"""The engine keeps nothing of what has ended: a short churn of everything at once, every block and table looked at."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.soak import Soak, SoakSettings, grown, slope
from benchmarks.soak_audit import Imbalance, tables
from serve_app.cache.lineage import scope_digest

LEFT_BYTES_AN_OPERATION = 200
"""A request that is kept is well over a thousand."""


@pytest.fixture
def soak(demo_model_path: Path, tmp_path: Path) -> Iterator[Soak]:
    made = Soak(demo_model_path, tmp_path, SoakSettings(num_blocks=128, host_blocks=32, disk_blocks=64))
    yield made
    made.close()


def our_bytes() -> int:
    """What our modules' own lines have allocated and not freed, but for a cache of bounded size."""
    scope_digest.cache_clear()
    ours = [tracemalloc.Filter(True, f"*/{room}/*") for room in ("serve_app", "router")]
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces(ours).statistics("filename"))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_churn_leaves_nothing_behind(soak: Soak) -> None:
    """Blocks are conserved at every check, events tell what is held, answers do not change, and no table grows."""
    operations = 50
    for _ in range(4):
        soak.churn(operations)
        soak.check()
    tracemalloc.start()
    try:
        soak.churn(operations)
        soak.check()
        before = our_bytes()
        for _ in range(3):
            soak.churn(operations)
            soak.check()
        left = our_bytes() - before
    finally:
        tracemalloc.stop()
    assert grown(soak.checks) == {}
    assert left < 3 * operations * LEFT_BYTES_AN_OPERATION
    ended = soak.ledger.ended
    assert not ended["error"]
    assert ended["length"] > 100 and ended["cancelled"] > 5
    for what in ("saved", "adapters loaded", "adapters unloaded", "refused: UnknownAdapter", "refused: RequestTooLong"):
        assert soak.done[what], f"nothing was {what}"


def test_the_audit_sees_what_is_lost_and_what_is_left(soak: Soak) -> None:
    """It can fail: on a block that nobody has, on one announced and not held, on a request that stays."""
    soak.check()
    cache = soak.engine._cache
    block = cache.pool._free.pop()
    with pytest.raises(Imbalance, match="127 of 128 blocks"):
        soak.check()
    cache.pool._free.append(block)
    soak.check()
    soak.ledger.announced["pool"].pop()
    with pytest.raises(Imbalance, match="announced"):
        soak.check()


def test_tables_count_what_is_reachable_and_growth_is_seen(soak: Soak) -> None:
    sizes = tables(soak.engine)
    assert sizes["BlockPool._references"] == 128
    assert sizes["Inbox._live"] == 0
    checks = [{"a": 10, "b": 500}, {"a": 20, "b": 500}, {"a": 200, "b": 560}]
    assert grown(checks) == {"a": (20, 200)}


@pytest.mark.parametrize("kb_per_min", [0.0, 300.0])
def test_a_slope_is_found_in_noise(kb_per_min: float) -> None:
    """The interval holds the truth; the first third does not count."""
    noise = np.random.default_rng(1).normal(0, 200, 600)
    samples = [
        (float(t), int(1024 * (50_000 + kb_per_min * t / 60 + noise[t] + 5_000 * min(1, t / 60)))) for t in range(600)
    ]
    found = slope(samples)
    low, high = found["interval"]
    assert low < kb_per_min < high
    assert high - low < 200
