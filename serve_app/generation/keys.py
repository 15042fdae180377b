"""The keys of a prompt's KV (cached scope roots) and of its placement. The secret stays in this module."""

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import xxhash

from router.protocol.block_hash import HASH_BYTES, PrefixScope, hash_at, system_prompt_key
from serve_app.engine.protocol import AdapterSpec
from serve_app.prompts.registry import Prompts
from serve_app.tenants.tenants import Tenant, Tenants
from serve_app.tokenization.tokenizer import EncodedPrompt

PLACEMENT_BLOCKS = 16
"""Prompts without a system prompt are placed by their first blocks, up to this many: equal ones share a replica."""


@dataclass(frozen=True, slots=True)
class Keys:
    """A private scope and its root; ``public_root``: the public scope's, b"" if there are no public prompts."""

    scope: PrefixScope
    root: bytes
    public_root: bytes


class ScopeKeys:
    """The keys of one model's scopes. ``fingerprint``: the model's."""

    def __init__(self, fingerprint: str, tenants: Tenants, secret: bytes, prompts: Prompts) -> None:
        self._fingerprint = fingerprint
        self._tenants = tenants
        self._secret = secret
        self._prompts = prompts
        self._known = lru_cache(4096)(self._make)

    def clear(self) -> None:
        """Clear the cache: salts follow the tenants, and public roots exist only with public prompts."""
        self._known.cache_clear()

    def of(self, tenant: Tenant, cache_salt: str | None, adapter: AdapterSpec | None) -> Keys:
        """Return the keys of a tenant's scope; ``adapter`` None: those of the model alone."""
        return self._known(tenant, cache_salt, adapter.key if adapter is not None else "")

    def _make(self, tenant: Tenant, cache_salt: str | None, lora: str) -> Keys:
        scope = PrefixScope(self._fingerprint, lora, self._tenants.salt(tenant, cache_salt))
        return Keys(scope, scope.root(self._secret), scope.public.root(self._secret) if self._prompts else b"")

    def placement(self, keys: Keys, prompt_cache_key: str | None, encoded: EncodedPrompt, system_text: str) -> bytes:
        """Return the 16 bytes that place a prompt while no replica holds it; ``system_text`` "": it has none."""
        # A public prompt that no replica holds yet is computed once, not once per tenant.
        shared = not prompt_cache_key and encoded.public_blocks and self._prompts.is_public(system_text)
        return placement_key(keys.public_root if shared else keys.root, prompt_cache_key, encoded, system_text)


def placement_key(root: bytes, prompt_cache_key: str | None, encoded: EncodedPrompt, system_text: str) -> bytes:
    """Return the 16 bytes that place a prompt under ``root``."""
    if prompt_cache_key:
        return xxhash.xxh3_128_digest(root + b"prompt_cache_key:" + prompt_cache_key.encode())
    if system_text:
        return system_prompt_key(root, system_text)
    blocks = min(PLACEMENT_BLOCKS, len(encoded.block_hashes) // HASH_BYTES)
    if blocks:
        return hash_at(encoded.block_hashes, blocks - 1)
    return xxhash.xxh3_128_digest(root + encoded.token_ids.tobytes())


def session_key(tenant: str, word: str) -> str:
    """Return 16 hexadecimal digits for a tenant's session word, "" for none; the word itself is not passed on."""
    return hashlib.blake2b(f"{tenant}\0{word}".encode(), digest_size=8).hexdigest() if word else ""
