"""The digest that verifies a block outside the pool. It covers the block's scope and all tokens up to its end.

A block's xxHash can collide and proves nothing about earlier blocks. In the pool, the parent proves them.
"""

from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

from router.protocol.block_hash import PrefixScope, TokenArray

DIGEST_BYTES = 32


@lru_cache(maxsize=1024)
def scope_digest(scope: PrefixScope) -> bytes:
    """Return the 32-byte digest of a block's scope (length-prefixed fields). It reveals nothing about a secret salt."""
    digest = blake2b(digest_size=DIGEST_BYTES)
    for field in (scope.model.encode(), scope.lora.encode(), scope.salt):
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)
    return digest.digest()


def next_digest(parent: bytes, scope: bytes, token_bytes: bytes) -> bytes:
    """Return a block's digest from its parent's (b"" for the first block), its scope's digest and its token ids."""
    return blake2b(parent + scope + token_bytes, digest_size=DIGEST_BYTES).digest()


def extend_digests(parent: bytes, scope: PrefixScope, token_ids: TokenArray, block_size: int) -> list[bytes]:
    """Return the digests of the full blocks of ``token_ids`` that follow ``parent``, each under its own scope."""
    raw = token_ids.astype("<i4", copy=False).tobytes()
    public, private = scope_digest(scope.public), scope_digest(scope.private)
    step = 4 * block_size
    digests = []
    for index, start in enumerate(range(0, len(raw) - step + 1, step)):
        digest = public if index < scope.public_blocks else private
        parent = next_digest(parent, digest, raw[start : start + step])
        digests.append(parent)
    return digests


@dataclass(frozen=True, slots=True)
class TierBlock:
    """A block's identity outside the pool. ``owner``: the key of its account (see ``TierIndex``), "" if unknown."""

    block_hash: bytes
    prefix_digest: bytes
    scope: bytes
    lora: str
    token_bytes: bytes
    owner: str
