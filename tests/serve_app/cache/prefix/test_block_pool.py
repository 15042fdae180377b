"""Rules of the block pool."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.cache.prefix.block_pool import BlockPool


def test_a_block_cannot_be_released_twice() -> None:
    pool = BlockPool(1)
    (block,) = pool.take(1)
    pool.release(block, keep=True)
    with pytest.raises(ValueError, match="not in use"):
        pool.release(block, keep=True)
    pool.free_idle(block)
    with pytest.raises(KeyError):
        pool.free_idle(block)


@given(st.lists(st.tuples(st.sampled_from(["take", "retain", "keep", "drop", "free"]), st.integers(0, 5)), max_size=60))
def test_free_idle_and_used_always_make_the_total(steps: list[tuple[str, int]]) -> None:
    """Conservation, counted independently, after every operation; what was free is handed out in ascending order."""
    pool = BlockPool(6)
    assert pool.take(6) == list(range(6))
    for block in range(5, -1, -1):
        pool.release(block, keep=False)
    references: dict[int, int] = {}
    idle: set[int] = set()
    for what, number in steps:
        if what == "take" and number <= pool.free_blocks:
            references.update(dict.fromkeys(pool.take(number), 1))
        elif what == "retain" and (number in references or number in idle):
            pool.retain(number)
            idle.discard(number)
            references[number] = references.get(number, 0) + 1
        elif what in ("keep", "drop") and number in references:
            last = pool.release(number, keep=what == "keep")
            references[number] -= 1
            assert last == (references[number] == 0)
            if last:
                del references[number]
                idle |= {number} if what == "keep" else set()
        elif what == "free" and number in idle:
            pool.free_idle(number)
            idle.remove(number)
        assert pool.used_blocks == len(references)
        assert pool.idle_blocks == len(idle)
        assert pool.free_blocks == 6 - len(references) - len(idle)
        assert all(pool.references(block) == references.get(block, 0) for block in range(6))
