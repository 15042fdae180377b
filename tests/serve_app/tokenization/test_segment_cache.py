"""The tokenizer's memory: its charge is the sum of its entries, within the bound, and the oldest goes first."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.protocol.block_hash import TokenArray
from serve_app.tokenization.segment_cache import CHAIN_ENTRY_BYTES, IDS_ENTRY_BYTES, ChainLink, SegmentCache

KEYS = st.sampled_from([bytes([i]) for i in range(8)])
ENTRIES = st.one_of(
    st.integers(0, 200).map(lambda size: np.zeros(size, dtype=np.int32)),
    st.integers(0, 20).map(lambda blocks: ChainLink(b"k", bytes(16 * blocks))),
)


def _charge(entry: TokenArray | ChainLink) -> int:
    if isinstance(entry, ChainLink):
        return CHAIN_ENTRY_BYTES + len(entry.block_hashes)
    return IDS_ENTRY_BYTES + 4 * len(entry)


@given(steps=st.lists(st.tuples(KEYS, ENTRIES | st.none()), max_size=40), capacity=st.integers(0, 3000))
def test_it_charges_the_sum_and_evicts_in_order_of_use(
    steps: list[tuple[bytes, TokenArray | ChainLink | None]], capacity: int
) -> None:
    """Against a list in order of use: puts replace, touches move to the end, the front goes when over the bound."""
    cache = SegmentCache(capacity)
    model: list[tuple[bytes, TokenArray | ChainLink]] = []
    for key, entry in steps:
        old = [pair for pair in model if pair[0] == key]
        if entry is None:
            cache.touch([key])
            model = [pair for pair in model if pair[0] != key] + old
        else:
            cache.put(key, entry)
            if _charge(entry) <= capacity:
                model = [pair for pair in model if pair[0] != key] + [(key, entry)]
            while sum(_charge(kept) for _, kept in model) > capacity:
                model.pop(0)
        stats = cache.stats()
        assert stats.bytes == sum(_charge(kept) for _, kept in model) <= capacity
        assert stats.entries == len(model)
        for name in (bytes([i]) for i in range(8)):
            found = cache.link(name) if cache.link(name) is not None else cache.ids(name)
            assert found is dict(model).get(name)


def test_a_negative_bound_is_refused() -> None:
    """It would evict for ever."""
    with pytest.raises(ValueError, match="negative"):
        SegmentCache(-1)
