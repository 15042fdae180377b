"""The engine keeps nothing of what has ended: a short churn of everything at once, every block and table looked at."""

from __future__ import annotations

import ctypes
import gc
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.soak.audit import Imbalance, tables
from benchmarks.soak.memory import MemorySample, grown, memory_figures, slope
from benchmarks.soak.run import Soak, SoakSettings
from serve_app.cache.prefix_digest import scope_digest

LEFT_BYTES_AN_OPERATION = 500
"""A request that is kept is well over a thousand; what is cached varies a little from check to check."""


@pytest.fixture
def soak(demo_model_path: Path, tmp_path: Path) -> Iterator[Soak]:
    gc.collect()
    gc.freeze()  # a check looks through all objects: those of torch and of other tests are not what it is about
    made = Soak(demo_model_path, tmp_path, SoakSettings(num_blocks=128, host_blocks=32, disk_blocks=64))
    yield made
    made.close()
    gc.unfreeze()


def our_bytes() -> int:
    """What our modules' own lines have allocated and not freed, but for a cache of bounded size."""
    scope_digest.cache_clear()
    ours = [tracemalloc.Filter(True, f"*/{room}/*") for room in ("serve_app", "router")]
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces(ours).statistics("filename"))


def test_churn_leaves_nothing_behind(soak: Soak) -> None:
    """Blocks are conserved at every check, events tell what is held, answers do not change, and no table grows."""
    tracemalloc.start()
    try:
        sizes = []
        for _ in range(7):
            soak.churn(20)
            soak.check()
            sizes.append(our_bytes())
    finally:
        tracemalloc.stop()
    assert grown(soak.checks) == {}
    assert sizes[-1] < max(sizes[:4]) + 3 * 20 * LEFT_BYTES_AN_OPERATION, sizes
    ended = soak.ledger.ended
    assert not ended["error"]
    assert ended["length"] > 50 and ended["cancelled"] > 2
    for what in ("saved", "adapters loaded", "refused: UnknownAdapter", "refused: RequestTooLong"):
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


def test_a_leak_is_found(soak: Soak, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that keeps every request that ended is caught after a hundred of them."""
    kept: list[object] = []
    monkeypatch.setattr(soak.engine, "kept", kept, raising=False)
    inbox, remove = soak.engine._inbox, soak.engine._inbox.remove_live
    monkeypatch.setattr(inbox, "remove_live", lambda sequence: (kept.append(sequence), remove(sequence)))
    soak.churn(10)
    soak.check()
    soak.churn(130)
    soak.check()
    assert {"table TorchEngine.kept", "SequenceState", "EngineRequest"} <= grown(soak.checks).keys()


def test_tables_count_what_is_reachable_and_growth_is_seen(soak: Soak) -> None:
    sizes = tables(soak.engine)
    assert sizes["BlockPool._references"] == 128
    assert sizes["Inbox._live"] == 0
    checks = [{"a": 10, "b": 500}, {"a": 20, "b": 500}, {"a": 200, "b": 560}]
    assert grown(checks) == {"a": (20, 200)}


def test_memory_is_taken_apart() -> None:
    """A large array is mapped or in the heap, small objects are Python's, and both are gone when they are dropped."""
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("only glibc says what malloc has given out")
    before = MemorySample.take(0.0)
    kept = [np.ones(1 << 20), *(np.ones(1) for _ in range(20_000))]
    during = MemorySample.take(1.0)
    del kept
    after = MemorySample.take(2.0)
    given_out = [sample.heap_bytes + sample.mapped_bytes for sample in (before, during, after)]
    # Less than the array's 8 MiB, for what earlier tests left may be freed at any time.
    assert given_out[1] - given_out[0] > 6 << 20
    assert given_out[1] - given_out[2] > 6 << 20
    assert during.python_blocks - before.python_blocks > 15_000
    assert during.python_blocks - after.python_blocks > 15_000
    figures = memory_figures([before, during, after])
    assert figures["malloc_mapped"]["most_mb"] >= figures["malloc_mapped"]["end_mb"]
    assert figures["python_blocks"] == {"half_time": during.python_blocks, "end": after.python_blocks}


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
