"""The root of a request's KV: the same in the router, which predicts, and in the replica, which salts."""

import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256

from router.protocol.block_hash import PrefixScope
from serve_app.ray_llm.tenant_header import only_value
from serve_app.tenants import load_secret

TENANT_HEADER = "WARMPATH_TENANT_HEADER"
"""The key in an ``LLMConfig``'s ``experimental_configs``. "": all requests belong to one tenant."""

DEFAULT_TENANT_HEADER = "authorization"
METADATA = "warmpath"
"""The key under which a replica advertises its ``EngineFacts``, as a dict."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts of the engines for a router. ``model``: their model's id; ``source``: where its files come from.

    ``secret_check``: equal if the secrets are equal.
    """

    model: str
    source: str
    block_size: int
    tenant_header: str
    secret_check: str


class Scopes:
    """The roots of one model's scopes. The secret is ``WARMPATH_SECRET``, else that of this machine's user."""

    def __init__(self, model: str, tenant_header: str) -> None:
        """Raises SecretError."""
        self._model = model
        self._header = tenant_header.lower()
        self._secret = load_secret()
        self.check = PrefixScope("check").root(self._secret).hex()
        self._roots = lru_cache(4096)(self._make)

    def tenant_in(self, headers: Mapping[str, str] | Iterable[tuple[str, str]]) -> str:
        """Return the tenant of these headers, as a digest: no key is stored. "" if tenants are not separated.

        Requests without the header form a tenant of their own. Raises RepeatedTenant.
        """
        pairs = headers.items() if isinstance(headers, Mapping) else headers
        return self.tenant_of(only_value(pairs, self._header))

    def tenant_of(self, value: str) -> str:
        """Return the tenant for the header's value."""
        return hmac.digest(self._secret, value.encode(), "sha256").hex()[:32] if self._header else ""

    def root(self, tenant: str, lora: str, cache_salt: str | None) -> bytes:
        """Return a tenant's root, which a client's own salt divides further; ``lora``: the adapter's id."""
        salt = b"" if cache_salt is None else b"\1" + _digest(cache_salt)
        # Clients choose the length of both words, so only their digests are kept.
        return self._roots(tenant, _digest(lora).hex() if lora else "", salt)

    def _make(self, tenant: str, lora: str, own: bytes) -> bytes:
        salt = sha256(len(tenant).to_bytes(8, "little") + tenant.encode() + own).digest()
        return PrefixScope(self._model, lora, salt).root(self._secret)


def _digest(text: str) -> bytes:
    return sha256(text.encode()).digest()
