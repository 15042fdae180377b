"""Under which root a request's KV lies: said alike by the router, which predicts, and the replica, which salts."""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256

from router.protocol.block_hash import PrefixScope
from serve_app.tenants.secret import load_secret

TENANT_HEADER = "WARMPATH_TENANT_HEADER"
"""The key in an ``LLMConfig``'s ``experimental_configs``. "": all requests are one tenant's."""

DEFAULT_TENANT_HEADER = "authorization"
METADATA = "warmpath"
"""The key under which a replica advertises its ``EngineFacts``, as a dict."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a router has to know of the engines. ``model``: their model's id; ``source``: where its files come from.

    ``secret_check``: equal where the secret is.
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
        self._known = lru_cache(4096)(self._make)

    def tenant_in(self, headers: Mapping[str, str]) -> str:
        """Return the tenant that headers name, by a digest: a key is kept nowhere. "" where tenants are not told apart.

        A request without the header is of a tenant that has none.
        """
        return self.tenant_of(next((value for name, value in headers.items() if name.lower() == self._header), ""))

    def tenant_of(self, value: str) -> str:
        """Return the tenant that the header's value names."""
        return hmac.digest(self._secret, value.encode(), "sha256").hex()[:32] if self._header else ""

    def root(self, tenant: str, lora: str, cache_salt: str | None) -> bytes:
        """Return a tenant's root, which a client's own salt divides further; ``lora``: the adapter's id."""
        return self._known(tenant, lora, cache_salt)

    def _make(self, tenant: str, lora: str, cache_salt: str | None) -> bytes:
        own = b"" if cache_salt is None else b"\1" + cache_salt.encode()
        salt = sha256(len(tenant).to_bytes(8, "little") + tenant.encode() + own).digest()
        return PrefixScope(self._model, lora, salt).root(self._secret)
