"""Keys of prefix blocks: PrefixScope + token ids -> a chain of 16-byte block hashes.

Owns the byte layout of every hash, so that a router and a replica in different processes (or on different
machines) agree. Knows nothing of caches, replicas or text beyond the system-prompt key. A chain travels as one
packed ``bytes`` of ``16 * n_blocks``; block ``i`` is ``chain[16 * i : 16 * i + 16]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import xxhash

HASH_BYTES = 16
"""Bytes of one block hash (xxh3_128) and of a scope root (BLAKE2b-128)."""

TokenArray = npt.NDArray[np.int32]
"""Token ids: one-dimensional, int32, little-endian in memory."""


@dataclass(frozen=True, slots=True)
class PrefixScope:
    """What must be equal, besides the tokens, for two requests to share KV.

    ``model`` is the fingerprint of config and weights index, ``lora`` the adapter's name and weights digest
    ("" for the base model), ``salt`` the tenant's derived salt (b"" for a public scope).
    """

    model: str
    lora: str = ""
    salt: bytes = b""

    def root(self, secret: bytes) -> bytes:
        """Return the 16-byte hash under which this scope's first block hangs.

        Each field is length-prefixed, so ("a", "bc") and ("ab", "c") differ; the key makes roots, and so every
        block hash, unpredictable to whoever lacks ``secret`` (1 to 64 bytes).
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

    ``parent`` is a scope root or the hash of the block before; a trailing partial block is not hashed.
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


def split_chain(chain: bytes) -> Iterator[bytes]:
    """Yield the 16-byte hashes of a packed chain in order."""
    for start in range(0, len(chain), HASH_BYTES):
        yield chain[start : start + HASH_BYTES]


def common_blocks(one: bytes, other: bytes) -> int:
    """Return how many leading hashes two packed chains share; equal hashes at a block mean equal blocks up to it."""
    low, high = 0, min(len(one), len(other)) // HASH_BYTES
    while low < high:
        middle = (low + high) // 2
        at = middle * HASH_BYTES
        if one[at : at + HASH_BYTES] == other[at : at + HASH_BYTES]:
            low = middle + 1
        else:
            high = middle
    return low


def system_prompt_key(root: bytes, formatted_system_prompt: str) -> bytes:
    """Return the 16-byte key of a formatted system prompt under a scope root.

    It costs one hash of the text, needs no tokens, and orders replicas by rendezvous hashing while nobody
    holds the prompt yet.
    """
    return xxhash.xxh3_128_digest(root + formatted_system_prompt.encode())
