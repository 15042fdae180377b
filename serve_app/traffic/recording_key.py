"""The key of a recording: made for it, kept in memory alone, and gone with it.

It turns block hashes into ids and names into pseudonyms. Without it, neither who knows a prompt nor who knows the
deployment's secret can tell which ids it has, and files of two recordings share none.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from router.protocol.block_hash import HASH_BYTES

KEY_BYTES = 32
ID_BITS = 53
"""Readers in JavaScript and jq keep whole numbers of so many bits."""

_KINDS = frozenset({"tenant", "session", "request", "adapter", "replica"})


@dataclass(frozen=True, slots=True, order=True)
class KeyOffer:
    """A key that an ingress has made for its recording to ``path``: of several, all ingresses use the least."""

    made_s: float
    key: bytes = field(repr=False)
    path: str = field(compare=False)

    @classmethod
    def new(cls, path: str) -> KeyOffer:
        """Return a new random key."""
        return cls(time.time(), secrets.token_bytes(KEY_BYTES), path)

    @property
    def public(self) -> str:
        """The recording's name: it tells nothing of the key."""
        return blake2b(b"warmpath recording", digest_size=8, key=self.key, person=b"recording").hexdigest()


class RecordingKey:
    """Ids and pseudonyms by the key of an offer. ``public``: as there. Not thread-safe."""

    def __init__(self, offer: KeyOffer) -> None:
        key, self.public = offer.key, offer.public
        if len(key) != KEY_BYTES:
            raise ValueError(f"a recording's key has {KEY_BYTES} bytes, not {len(key)}")
        # A block hash is one block of the cipher: equal ones become equal, and the cipher is a permutation.
        self._encryptor = Cipher(algorithms.AES256(key), modes.ECB()).encryptor()  # noqa: S305
        self._names = {kind: blake2b(digest_size=8, key=key, person=kind.encode()) for kind in _KINDS}

    def ids(self, block_hashes: bytes) -> list[int]:
        """Return an id of ``ID_BITS`` for each of the packed hashes."""
        words = np.frombuffer(self._encryptor.update(block_hashes), dtype="<u8")[::2]
        ids: list[int] = (words >> np.uint64(64 - ID_BITS)).tolist()
        return ids

    def name(self, kind: str, word: str) -> str:
        """Return a pseudonym in hexadecimal digits, "" for no name."""
        if not word:
            return ""
        digest = self._names[kind].copy()
        digest.update(word.encode())
        return digest.hexdigest()


def every(block_hashes: bytes, blocks: int) -> bytes:
    """Return the last hash of every group of so many blocks: it stands for all before it. A rest has none."""
    if blocks == 1:
        return block_hashes
    hashes = np.frombuffer(block_hashes, dtype=f"V{HASH_BYTES}")
    return hashes[blocks - 1 :: blocks].tobytes()
