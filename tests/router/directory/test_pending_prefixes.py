"""Prefixes in progress: as a naive list of decisions has them, by placement key, bounded by key and by keys."""

from itertools import takewhile
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from router.directory.pending_prefixes import PendingPrefixes
from router.protocol.block_hash import HASH_BYTES

SIZE, MOST_KEYS, CHAINS_A_KEY = 16, 3, 4
CHAINS = st.lists(st.sampled_from("xy"), max_size=5).map("".join)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 4), st.sampled_from("abc"), CHAINS),
        st.tuples(st.just("add"), st.just(0), st.sampled_from("abc"), CHAINS),
        st.tuples(st.just("discard"), st.integers(0, 30)),
    ),
    max_size=30,
)


def packed(chain: str) -> bytes:
    return b"".join(chain[: end + 1].encode().ljust(HASH_BYTES, b".") for end in range(len(chain)))


@settings(max_examples=300)
@given(STEPS, CHAINS)
def test_a_prefix_is_in_progress_as_long_as_one_of_the_last_decisions_computes_it(
    steps: list[tuple[Any, ...]], asked: str
) -> None:
    """Of a key's decisions the last four count, even after later ones ended; of the keys the last ones."""
    pending = PendingPrefixes(SIZE, MOST_KEYS)
    keys: dict[int, list[tuple[int, str, str]]] = {}
    for number, (kind, *how) in enumerate(steps):
        if kind == "add":
            key, replica, chain = how
            pending.add(bytes([key]), number, replica, packed(chain))
            keys[key] = [*keys.get(key, []), (number, replica, chain)][-CHAINS_A_KEY:]
            if len(keys) > MOST_KEYS:
                del keys[next(iter(keys))]
        else:
            pending.discard(how[0])
            left = {key: [row for row in rows if row[0] != how[0]] for key, rows in keys.items()}
            keys = {key: rows for key, rows in left.items() if rows}
        for key in range(5):
            found: dict[str, int] = {}
            for _, replica, chain in keys.get(key, ()):
                equal = takewhile(lambda pair: pair[0] == pair[1], zip(asked, chain, strict=False))
                if tokens := sum(SIZE for _ in equal):
                    found[replica] = max(found.get(replica, 0), tokens)
            assert pending.match(bytes([key]), packed(asked)) == found
        assert {number for rows in keys.values() for number, *_ in rows} == pending._key_of.keys()
        assert {bytes([key]) for key in keys} == pending._chains.keys()
