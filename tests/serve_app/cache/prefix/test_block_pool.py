"""Rules of the block pool; that free, idle and used make the total is a law of ``test_prefix_cache_laws``."""

import pytest

from serve_app.cache.prefix.block_pool import BlockPool, PoolExhausted


def test_blocks_are_handed_out_as_neighbours_and_never_twice() -> None:
    """Blocks come in order from a fresh pool, and again after a release tail first; a too large request takes none."""
    pool = BlockPool(8)
    blocks = pool.take(5)
    assert blocks == [0, 1, 2, 3, 4]
    with pytest.raises(PoolExhausted):
        pool.take(4)
    for block in reversed(blocks):
        pool.release(block, keep=False)
    assert pool.take(8) == list(range(8))


def test_a_block_cannot_be_released_twice() -> None:
    pool = BlockPool(1)
    (block,) = pool.take(1)
    pool.release(block, keep=True)
    with pytest.raises(ValueError, match="not in use"):
        pool.release(block, keep=True)
    pool.free_idle(block)
    with pytest.raises(KeyError):
        pool.free_idle(block)
