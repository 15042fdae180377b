"""Pins end with their time, whoever looks when; the oracle searches all of them each time."""

from hypothesis import given
from hypothesis import strategies as st

from serve_app.cache.prefix.pins import Pins
from tests.serve_app.cache.prefix.naive_cache import NaivePins

TTL_S, BLOCKS = 4.0, 3
STEPS = st.tuples(
    st.sampled_from((0.0, 0.5, 1.0, 2.0, 1000.0)),
    st.sampled_from(("pin", "read", "look")),
    st.integers(1, BLOCKS),
    st.sampled_from((None, TTL_S, 2 * TTL_S)),
)


@given(st.lists(STEPS, max_size=30))
def test_a_pin_lives_for_its_time_after_the_last_read_within_it(
    steps: list[tuple[float, str, int, float | None]],
) -> None:
    """A read, or another save, after its time renews nothing of it, even if nobody has looked since."""
    pins, naive, now_s = Pins(BLOCKS), NaivePins(BLOCKS, {"default": BLOCKS}), 0.0
    for times, action, length, ttl_s in steps:
        now_s += times * TTL_S
        blocks, key = list(range(length)), bytes([length])
        if action == "pin":
            assert pins.add(key, blocks, ttl_s, now_s) == naive.add(key, blocks, ttl_s, now_s, "default")
        elif action == "read":
            pins.read(blocks, now_s)
            naive.read(blocks, now_s)
        else:
            for ended in pins.expired(now_s):
                pins.remove(ended)
            naive.expire(now_s)
        expected = {key: (pin.ttl, pin.ends_s) for key, pin in naive.pins.items()}
        assert {pin.key: (pin.ttl_s, pin.expires_s) for pin in pins.soonest_first()} == expected
        soonest_s = min((pin.ends_s for pin in naive.pins.values()), default=float("inf"))
        assert (pins.next_expiry_s or float("inf")) <= soonest_s
