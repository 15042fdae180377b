"""The pool and the tiers evict in one order: by standing, then the least recently used first."""

from hypothesis import given
from hypothesis import strategies as st

from serve_app.cache.eviction import EvictionQueue, Standing


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 9), st.one_of(st.none(), st.tuples(st.integers(0, 9), st.sampled_from(Standing))))
    )
)
def test_a_queue_gives_the_lowest_first(steps: list[tuple[int, tuple[int, Standing] | None]]) -> None:
    """It equals a plain search through any insertions, moves and removals; equal entries leave in order of arrival."""
    queue: EvictionQueue[int] = EvictionQueue()
    naive: dict[int, tuple[Standing, int, int]] = {}
    for number, (key, place) in enumerate(steps):
        if place is None:
            queue.discard(key)
            naive.pop(key, None)
        else:
            queue.put(key, *place)
            naive[key] = place[1], place[0], number
        assert len(queue) == len(naive)
        if naive:
            assert queue.first() == min(naive, key=naive.__getitem__)
