"""The tokenizer's memory: its charge is the sum of its segments, within the bound, and the oldest goes first."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.tokenization.segment_cache import ENTRY_BYTES, Segment, SegmentCache

KEYS = [bytes([i]) for i in range(4)]
STEPS = st.tuples(
    st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True),
    st.none() | st.tuples(st.integers(0, 200), st.integers(0, 20)),
)


@given(steps=st.lists(STEPS, max_size=40), capacity=st.sampled_from([0, 500, 3000, 9000]))
def test_it_charges_the_sum_and_evicts_in_order_of_use(
    steps: list[tuple[list[bytes], tuple[int, int] | None]], capacity: int
) -> None:
    """Against a list in order of use: puts replace, a look-up moves what it finds to the end, its beginning last."""
    cache = SegmentCache(capacity)
    model: list[tuple[bytes, Segment]] = []
    hits = misses = 0

    def charged() -> int:
        return sum(ENTRY_BYTES + 4 * len(segment.ids) + len(segment.block_hashes) for _, segment in model)

    for keys, size in steps:
        held = dict(model)
        if size is None:
            assert cache.get(keys) == [held.get(key) for key in keys]
            found = [(key, held[key]) for key in reversed(keys) if key in held]
            hits, misses = hits + len(found), misses + len(keys) - len(found)
            model = [pair for pair in model if pair[0] not in keys] + found
        else:
            segment = Segment(np.zeros(size[0], dtype=np.int32), bytes(16 * size[1]))
            cache.put((key, segment) for key in keys)
            for key in keys if segment.charge <= capacity else ():
                model = [pair for pair in model if pair[0] != key] + [(key, segment)]
                while charged() > capacity:
                    model.pop(0)
        stats = cache.stats()
        assert stats.bytes == charged() <= capacity
        assert (stats.entries, stats.hits, stats.misses) == (len(model), hits, misses)
        assert list(cache._segments) == [key for key, _ in model], "the first to go first"


def test_a_negative_bound_is_refused() -> None:
    """It would evict for ever."""
    with pytest.raises(ValueError, match="negative"):
        SegmentCache(-1)
