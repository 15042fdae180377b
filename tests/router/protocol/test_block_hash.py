"""Laws of the keys: equal prefixes share hashes, scopes that differ share none, and public prompts are shared."""

from dataclasses import replace

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from router.protocol.block_hash import (
    HASH_BYTES,
    PrefixScope,
    block_word,
    extend_chain,
    hash_blocks,
    private_parent,
    split_chain,
    xor_of_words,
)
from router.protocol.samples import Histogram

SECRET = b"k" * 32
IDS = st.lists(st.integers(0, 2), max_size=24)
FIELDS = st.sampled_from(["", "a", "b", "ab", "abc"])
SCOPES = st.builds(lambda model, lora, salt: PrefixScope(model, lora, salt.encode()), FIELDS, FIELDS, FIELDS)
SIZES = st.integers(1, 5)


def array(ids: list[int]) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


def chain_of(scope: PrefixScope, ids: list[int], size: int, public: int = 0) -> list[bytes]:
    """Return the chain that an ingress makes of a prompt with ``public`` public tokens at its start."""
    blocks = public // size
    root = scope.root(SECRET)
    return list(
        split_chain(extend_chain(scope.public.root(SECRET) + root if blocks else root, blocks, array(ids), size))
    )


def common(one: list[int] | list[bytes], other: list[int] | list[bytes]) -> int:
    return next(
        (i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other))
    )


@given(SCOPES, IDS, IDS, SIZES)
def test_equal_prefixes_share_exactly_their_full_blocks(
    scope: PrefixScope, one: list[int], other: list[int], size: int
) -> None:
    """Exactly the hashes of full blocks in the common prefix are equal, and none after it. (docs: caching)"""
    chains = chain_of(scope, one, size), chain_of(scope, other, size)
    assert [len(chain) for chain in chains] == [len(one) // size, len(other) // size]
    assert common(*chains) == common(one, other) // size
    assert not set(chains[0][common(*chains) :]) & set(chains[1][common(*chains) :])


@given(SCOPES, SCOPES, IDS, SIZES)
def test_any_difference_of_scope_shares_nothing(
    one: PrefixScope, other: PrefixScope, ids: list[int], size: int
) -> None:
    """Fields are length-prefixed: moving a letter from one to the next is a difference too. (docs: caching)"""
    shared = set(chain_of(one, ids, size)) & set(chain_of(other, ids, size))
    assert shared == (set(chain_of(one, ids, size)) if one == other else set())


@given(SCOPES, SCOPES, IDS, IDS, IDS, SIZES)
def test_exactly_the_blocks_wholly_inside_a_public_prompt_are_shared(
    one: PrefixScope, other: PrefixScope, prompt: list[int], mine: list[int], theirs: list[int], size: int
) -> None:
    """Two tenants have different private text after a part of the public prompt. (docs: caching)"""
    other = replace(other, model=one.model, lora=one.lora)
    ids = (prompt + mine, prompt + theirs)
    public = [common(prompt, one_ids) for one_ids in ids]
    chains = [chain_of(s, i, size, p) for s, i, p in zip((one, other), ids, public, strict=True)]
    if one.salt == other.salt:
        assert common(*chains) == common(*ids) // size
        return
    shared = common(ids[0], ids[1])
    expected = min(shared, *public) // size
    assert common(*chains) == expected
    assert not set(chains[0][expected:]) & set(chains[1][expected:])


@given(SCOPES, IDS, st.integers(0, 30), SIZES, st.integers(0, 30))
def test_a_chain_goes_on_from_any_part_of_it(
    scope: PrefixScope, ids: list[int], public: int, size: int, known: int
) -> None:
    """It also continues across the start of the private part, and equals the definition block by block."""
    blocks = min(public, len(ids)) // size
    public_root, root = scope.public.root(SECRET), scope.root(SECRET)
    whole = extend_chain(public_root + root if blocks else root, blocks, array(ids), size)
    part = whole[: HASH_BYTES * min(known, len(whole) // HASH_BYTES)]
    assert extend_chain(public_root + root if blocks else root, blocks, array(ids), size, part) == whole
    parent, expected = public_root if blocks else root, b""
    for i in range(len(ids) // size):
        if 0 < i == blocks:
            parent = private_parent(root, parent)
        parent = xxhash.xxh3_128_digest(parent + array(ids[size * i : size * (i + 1)]).astype("<i4").tobytes())
        expected += parent
    assert whole == expected


def test_the_secret_decides_every_root() -> None:
    """The secret must have a length that BLAKE2b accepts as a key."""
    scope = PrefixScope("m", "l", b"s")
    assert scope.root(b"one") != scope.root(b"two")
    for secret in (b"", b"x" * 65):
        with pytest.raises(ValueError, match="1 to 64 bytes"):
            scope.root(secret)


def test_scopes_of_blocks() -> None:
    """The first ``public_blocks`` have neither salt nor count, the others only the salt."""
    scope = PrefixScope("m", "l", b"salt", public_blocks=2)
    assert [scope.at(i) for i in range(4)] == [PrefixScope("m", "l")] * 2 + [PrefixScope("m", "l", b"salt")] * 2
    assert hash_blocks(b"r" * 16, array([]), 4) == b""


@given(hashes=st.lists(st.binary(min_size=16, max_size=16), max_size=20))
def test_words_are_the_same_one_by_one_and_together(hashes: list[bytes]) -> None:
    expected = 0
    for block_hash in reversed(hashes):
        expected ^= block_word(block_hash)
    assert xor_of_words(b"".join(hashes)) == expected < 1 << 64


@given(st.lists(st.floats(-10, 10)))
def test_buckets_are_cumulative_and_bounds_belong_to_them(values: list[float]) -> None:
    histogram = Histogram((0, 1.5, 5e-6 + 2))
    for value in values:
        histogram.observe(value)
    *buckets, total, count = histogram.samples("x", (("tier", "disk"),))
    assert [labels for _, labels, _ in buckets] == [
        (("tier", "disk"), ("le", bound)) for bound in ("0.0", "1.5", "2.000005", "+Inf")
    ]
    bounds = (0.0, 1.5, 2.000005, float("inf"))
    assert [number for _, _, number in buckets] == [sum(value <= bound for value in values) for bound in bounds]
    assert total == ("x_sum", (("tier", "disk"),), sum(values, 0.0))
    assert count == ("x_count", (("tier", "disk"),), len(values))
    assert {name for name, _, _ in buckets} == {"x_bucket"}
    assert histogram.count == len(values)
