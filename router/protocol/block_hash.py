"""Keys of prefix blocks: PrefixScope + token ids -> a chain of 16-byte block hashes.

It defines the byte layout of every hash, so that routers and replicas in different processes or machines agree. A
chain is transferred as one packed ``bytes`` of ``16 * n_blocks``; block ``i`` is ``chain[16 * i : 16 * i + 16]``. A
prompt's first blocks may be public: their parent is the public scope's root. The first private block's parent is
``private_parent``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from hashlib import blake2b
from operator import xor

import numpy as np
import numpy.typing as npt
import xxhash

HASH_BYTES = 16
"""Bytes of one block hash (xxh3_128) and of a scope root (BLAKE2b-128)."""

WORD_BITS = 28
WORD_MASK = (1 << WORD_BITS) - 1
"""The split of a key in ``block_word`` and in the directory's table."""

TokenArray = npt.NDArray[np.int32]
"""Token ids: one-dimensional, int32, little-endian in memory."""

ChainHasher = Callable[[bytes, TokenArray, int], bytes]
"""(parent, ids, block size) -> packed hashes, like ``hash_blocks``. Tests pass others to force collisions."""


@dataclass(frozen=True, slots=True)
class PrefixScope:
    """The fields that must be equal, besides the tokens, for two requests to share KV.

    ``model`` is the fingerprint of config and weights index, ``lora`` the adapter's name and weights digest
    ("" for the base model), ``salt`` the tenant's derived salt (b"" for a public scope). ``public_blocks``: the number
    of leading blocks of this request in the public scope; a block's own scope (``at``) has none.
    """

    model: str
    lora: str = ""
    salt: bytes = b""
    public_blocks: int = 0

    def at(self, index: int) -> PrefixScope:
        """Return the scope of a request's block ``index``."""
        return self.public if index < self.public_blocks else self.private

    @property
    def public(self) -> PrefixScope:
        """The scope that all tenants share."""
        return self if not (self.salt or self.public_blocks) else PrefixScope(self.model, self.lora)

    @property
    def private(self) -> PrefixScope:
        """The scope of the private blocks."""
        return replace(self, public_blocks=0) if self.public_blocks else self

    def root(self, secret: bytes) -> bytes:
        """Return the 16-byte hash that is the parent of this scope's first block.

        Each field is length-prefixed, so ("a", "bc") and ("ab", "c") differ. The key makes roots, and so every block
        hash, unpredictable without ``secret`` (1 to 64 bytes).
        """
        if not 1 <= len(secret) <= 64:
            raise ValueError(f"the deployment secret must have 1 to 64 bytes, not {len(secret)}")
        digest = blake2b(digest_size=HASH_BYTES, key=secret)
        for field in (self.model.encode(), self.lora.encode(), self.salt):
            digest.update(len(field).to_bytes(8, "little"))
            digest.update(field)
        return digest.digest()


def hash_blocks(parent: bytes, token_ids: TokenArray, block_size: int) -> bytes:
    """Return the packed hashes of the *full* blocks of ``token_ids`` that follow ``parent``.

    ``parent`` is a scope root or the hash of the block before. A trailing partial block is not hashed.
    block i = xxh3_128(parent hash || int32-LE ids of the block).
    """
    ids = np.ascontiguousarray(token_ids, dtype="<i4")
    raw = ids.data.cast("B")
    step = 4 * block_size
    digest = xxhash.xxh3_128_digest
    chain = bytearray()
    for start in range(0, len(raw) - step + 1, step):
        parent = digest(parent + raw[start : start + step])
        chain += parent
    return bytes(chain)


def private_parent(private_root: bytes, public_hash: bytes) -> bytes:
    """Return the parent of the first private block after ``public_hash``, keyed with the private scope's root."""
    return blake2b(public_hash, digest_size=HASH_BYTES, key=private_root).digest()


def extend_chain(
    root: bytes,
    public_blocks: int,
    token_ids: TokenArray,
    block_size: int,
    first: bytes = b"",
    hasher: ChainHasher = hash_blocks,
) -> bytes:
    """Return a prompt's chain that begins with ``first``. ``root``: the private root, after a public one if any."""
    done = len(first) // HASH_BYTES
    return first + next_hashes(root, public_blocks, token_ids, block_size, done, first[-HASH_BYTES:], hasher)


def next_hashes(
    root: bytes,
    public_blocks: int,
    token_ids: TokenArray,
    block_size: int,
    done: int,
    last: bytes,
    hasher: ChainHasher = hash_blocks,
) -> bytes:
    """Return a prompt's hashes from block ``done`` on. ``last``: the hash before it. ``root``: see ``extend_chain``."""
    more, full = b"", len(token_ids) // block_size
    while done < full:
        end = min(public_blocks, full) if done < public_blocks else full
        parent = last if done else root[:HASH_BYTES]
        if 0 < done == public_blocks:
            parent = private_parent(root[HASH_BYTES:], parent)
        more += hasher(parent, token_ids[done * block_size : end * block_size], block_size)
        done, last = end, more[-HASH_BYTES:]
    return more


def split_chain(chain: bytes) -> Iterator[bytes]:
    """Yield the 16-byte hashes of a packed chain in order."""
    for start in range(0, len(chain), HASH_BYTES):
        yield chain[start : start + HASH_BYTES]


def hash_at(chain: bytes, index: int) -> bytes:
    """Return the hash of block ``index`` of a packed chain; b"" past its end."""
    return chain[HASH_BYTES * index : HASH_BYTES * (index + 1)]


def block_word(block_hash: bytes) -> int:
    """Return a block's word. The digest of a set of blocks is the XOR of their words.

    The word is the upper 36 bits times the lower 28 bits of the first 8 bytes, the directory's key. With the plain key,
    equal alterations of two blocks would cancel out.
    """
    key = int.from_bytes(block_hash[:8], "little")
    return (key >> WORD_BITS) * (key & WORD_MASK)


def xor_of_words(chain: bytes) -> int:
    """Return the XOR of the words of packed hashes."""
    whole = len(chain) // HASH_BYTES
    if whole < 16:  # numpy's calls would take longer
        return reduce(xor, map(block_word, split_chain(chain[: whole * HASH_BYTES])), 0)
    keys = np.frombuffer(chain, dtype="<u8", count=2 * whole)[::2]
    return int(np.bitwise_xor.reduce((keys >> np.uint64(WORD_BITS)) * (keys & np.uint64(WORD_MASK))))


def count_leading(chain: bytes, blocks: int, is_cached: Callable[[bytes], bool]) -> int:
    """Return the number of known hashes among the first ``blocks``. Every known hash must have a known parent."""
    return bisect_left(range(blocks), True, key=lambda i: not is_cached(hash_at(chain, i)))


def common_blocks(chain: bytes, other: bytes) -> int:
    """Return the number of leading hashes that two chains share. An equal hash implies equal blocks before it."""
    low, high = 0, min(len(chain), len(other)) // HASH_BYTES
    while low < high:
        middle = (low + high) // 2
        at = middle * HASH_BYTES
        if chain[at : at + HASH_BYTES] == other[at : at + HASH_BYTES]:
            low = middle + 1
        else:
            high = middle
    return low


def common_tokens(left: TokenArray, right: TokenArray) -> int:
    """Return the number of leading tokens that two sequences share."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def system_prompt_key(root: bytes, formatted_system_prompt: str) -> bytes:
    """Return a system prompt's 16-byte key, which orders replicas while no replica holds the prompt."""
    return xxhash.xxh3_128_digest(root + formatted_system_prompt.encode())
