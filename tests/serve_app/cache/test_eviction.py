"""One order of evictions for the pool and the tiers: what a queue gives is what ``rank`` says, standing first."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.cache import eviction
from serve_app.cache.eviction import Candidate, EvictionQueue, Standing, eviction_key
from tests.serve_app.cache.prefix.test_quota import Bench
from tests.serve_app.cache.tiers.test_disk import fill, tier
from tests.serve_app.cache.tiers.tier_blocks import held, path


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 9), st.one_of(st.none(), st.tuples(st.integers(0, 9), st.sampled_from(Standing))))
    )
)
def test_a_queue_gives_the_lowest_first(steps: list[tuple[int, tuple[int, Standing] | None]]) -> None:
    """As a plain search does, whatever was put, moved and taken out; of equals, whoever came to its place first."""
    queue: EvictionQueue[int] = EvictionQueue()
    naive: dict[int, tuple[tuple[int, float], int]] = {}
    for number, (key, place) in enumerate(steps):
        if place is None:
            queue.discard(key)
            naive.pop(key, None)
        else:
            candidate = Candidate(place[0], place[1])
            queue.put(key, candidate)
            naive[key] = eviction_key(candidate), number
        assert len(queue) == len(naive)
        if naive:
            assert queue.first() == min(naive, key=naive.__getitem__)


def test_another_order_is_another_rank_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest first, say: the pool and the disk both go by it, and pinned files still go last."""
    monkeypatch.setattr(eviction, "rank", lambda candidate: -candidate.used)
    bench = Bench(4)
    for number in range(4):
        (block,) = bench.fill("a", 1, number)
    assert bench.cache.allocate(1, "a") == [block]
    disk = tier(tmp_path, blocks=3)
    fill(disk, path(1), saved=True)
    for number in (2, 3, 4):
        fill(disk, path(number))
    assert held(disk.index) == {path(number)[0].block_hash for number in (1, 2, 4)}
