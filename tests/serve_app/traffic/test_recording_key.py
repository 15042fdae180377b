"""What a recording's ids tell, and what they do not."""

import hashlib
import hmac
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from router.protocol.block_hash import HASH_BYTES, PrefixScope, TokenArray, hash_blocks
from serve_app.traffic.recording_key import ID_BITS, KEY_BYTES, KeyOffer, RecordingKey, every

SECRET = b"the deployment's secret, which the attacker has"
TEXT = "You are a helpful clerk. What did Ada ask yesterday?"
PROMPT = np.arange(64, dtype=np.int32)
SCOPE = PrefixScope("model", "", b"salt of acme")
keys = st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES)
prompts = st.lists(st.integers(0, 3), max_size=40).map(lambda ids: np.array(ids, dtype=np.int32))


def of(key: bytes) -> RecordingKey:
    return RecordingKey(KeyOffer(0.0, key, ""))


def chain_of(scope: PrefixScope, ids: TokenArray, size: int = 4) -> bytes:
    return hash_blocks(scope.root(SECRET), ids, size)


@given(keys, prompts, prompts)
def test_equal_prefixes_share_ids_and_the_first_difference_ends_it(
    key: bytes, one: TokenArray, other: TokenArray
) -> None:
    """The oracle compares the tokens themselves."""
    made = of(key)
    ids, others = made.ids(chain_of(SCOPE, one)), made.ids(chain_of(SCOPE, other))
    assert (len(ids), len(others)) == (len(one) // 4, len(other) // 4)
    for block, (mine, theirs) in enumerate(zip(ids, others, strict=False), start=1):
        assert (mine == theirs) == (one[: 4 * block].tolist() == other[: 4 * block].tolist())
    assert all(0 <= one < 2**ID_BITS for one in ids)


@given(keys, prompts)
def test_other_scopes_and_other_recordings_share_no_id(key: bytes, ids: TokenArray) -> None:
    """Neither another salt, adapter or model, nor another key of the same traffic."""
    scopes = (SCOPE, PrefixScope("model", "", b"salt"), PrefixScope("model", "a", b"salt of acme"), PrefixScope("m"))
    found = [of(key).ids(chain_of(scope, ids)) for scope in scopes]
    found.append(of(hashlib.sha256(key).digest()).ids(chain_of(SCOPE, ids)))
    assert len({*itertools.chain(*found)}) == sum(map(len, found))


@given(prompts, st.integers(1, 5))
def test_coarse_ids_stand_for_all_before_them(ids: TokenArray, blocks: int) -> None:
    """They are those of every last block, as if each was chosen alone."""
    chain = chain_of(SCOPE, ids)
    each = [chain[at : at + HASH_BYTES] for at in range(0, len(chain), HASH_BYTES)]
    assert every(chain, blocks) == b"".join(each[blocks - 1 :: blocks])


def test_names_are_told_by_the_key_alone() -> None:
    """One name has one pseudonym of a kind; no name has none."""
    key, other = of(b"k" * KEY_BYTES), of(b"o" * KEY_BYTES)
    assert key.name("tenant", "acme") == key.name("tenant", "acme")
    told = {
        key.name("tenant", "acme"),
        key.name("session", "acme"),
        key.name("tenant", "b"),
        other.name("tenant", "acme"),
    }
    assert len(told) == 4
    assert key.name("tenant", "") == ""
    assert "acme" not in "".join(told)
    with pytest.raises(ValueError, match="32 bytes"):
        of(b"short")


def test_an_offer_shows_no_key() -> None:
    """Of several, the first made counts; a log that prints one tells nothing."""
    first, later = KeyOffer(1.0, b"z" * KEY_BYTES, "file"), KeyOffer(2.0, b"a" * KEY_BYTES, "other")
    assert min(later, first) is first
    assert "zzz" not in repr(first)
    assert KeyOffer.new("file").key != KeyOffer.new("file").key


def public_digests(data: bytes) -> Iterator[bytes]:
    """Yield every digest of some bytes that needs no key of a recording."""
    for name in sorted(hashlib.algorithms_available):
        made = hashlib.new(name, usedforsecurity=False)
        made.update(data)
        yield made.digest(32) if name.startswith("shake") else made.digest()  # type: ignore[call-arg]
    for secret in (SECRET, SCOPE.salt, SCOPE.root(SECRET), b"acme", b"warmpath recording"):
        yield hashlib.blake2b(data, key=secret[:64]).digest()
        yield hashlib.blake2b(data, key=secret[:64], digest_size=HASH_BYTES).digest()
        yield hmac.new(secret, data, "sha256").digest()
    yield from (xxhash.xxh3_128_digest(data), xxhash.xxh64_digest(data), xxhash.xxh3_64_digest(data))
    yield data


def words(digest: bytes) -> Iterator[int]:
    """Yield what an id could be of a digest: any 53 bits at the edge of any eight bytes, in both byte orders."""
    for at in range(max(1, len(digest) - 7)):
        for order in ("little", "big"):
            word = int.from_bytes(digest[at : at + 8], order)  # type: ignore[arg-type]
            yield from (word >> (64 - ID_BITS), word & ((1 << ID_BITS) - 1), word)


def test_a_known_prompt_cannot_be_guessed_from_a_file() -> None:
    """An attacker who has the prompt's text and tokens, the tenant's name and salt, and even the deployment's secret,
    computes every block hash, and every public digest of all that; none of it is an id or a pseudonym.
    """
    key = RecordingKey(KeyOffer.new("file"))
    chain = hash_blocks(SCOPE.root(SECRET), PROMPT, 16)
    hashes = [chain[at : at + HASH_BYTES] for at in range(0, len(chain), HASH_BYTES)]
    told = {*key.ids(chain)}
    names = {int(key.name(kind, "acme")[:13], 16) for kind in ("tenant", "session", "request")}
    known = [TEXT.encode(), b"acme", SECRET, SCOPE.salt, chain, PROMPT.tobytes(), key.public.encode(), *hashes]
    known += [PROMPT[: 16 * end].tobytes() for end in range(1, 5)] + [TEXT[:end].encode() for end in range(len(TEXT))]
    known += [hash_blocks(root, PROMPT, size) for root in (SECRET[:16], bytes(16)) for size in (1, 4, 16)]
    guesses = {guess for data in known for digest in public_digests(data) for guess in words(digest)}
    assert len(guesses) > 10_000
    assert not guesses & (told | names)
