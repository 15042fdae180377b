"""Whose a request and its blocks are, and tenants' weights, as they reach vLLM's core: plain data in ``extra_args``.

Imports no vllm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router.protocol.block_hash import HASH_BYTES
from serve_app.cache.prefix.quota import checked_weights

_TENANT = "warmpath.tenant"
_ORDER = "warmpath.order"
_PUBLIC = "warmpath.public"
_NOT_STORED = "warmpath.not_stored"
_SHARES = "warmpath.tenant_shares"


def tenant_args(tenant: str, order: int = 0) -> dict[str, Any]:
    """Return what a request's ``SamplingParams.extra_args`` say of its tenant, and of its place among that one's."""
    return {_TENANT: tenant, _ORDER: order}


def salt_of(root: bytes) -> str:
    """Return what vLLM puts into the hash of a chain's first block: the root, of a public chain the public one."""
    return root[:HASH_BYTES].hex()


def scope_args(root: bytes, public_tokens: int, *, store_kv: bool = True) -> dict[str, Any]:
    """Return what a request's ``extra_args`` say of its blocks; ``root`` as in ``EngineRequest``."""
    public = {_PUBLIC: [public_tokens, root[HASH_BYTES:].hex()]} if public_tokens else {}
    return public if store_kv else {**public, _NOT_STORED: True}


def shares_args(shares: Mapping[str, float]) -> dict[str, Any]:
    """Return ``extra_args`` of a request that sets every tenant's weight. Raises ValueError for a bad one."""
    return {_SHARES: checked_weights(shares)}


def tenant_of(request: Any) -> str:
    """Return the tenant of one of vLLM's ``Request``s; "" for what is nobody's."""
    return str(_extra_args(request).get(_TENANT, ""))


def order_of(request: Any) -> int:
    """Return the place of one of vLLM's ``Request``s among its tenant's: the lowest starts first."""
    return int(_extra_args(request).get(_ORDER, 0))


def public_part(request: Any) -> tuple[int, str]:
    """Return how many tokens of a request of vLLM's are public, and the salt of what follows; (0, "") for none."""
    tokens, salt = _extra_args(request).get(_PUBLIC, (0, ""))
    return tokens, salt


def stores_kv(request: Any) -> bool:
    """Return whether others may hit what a request of vLLM's computes."""
    return not _extra_args(request).get(_NOT_STORED, False)


def shares_of(request: Any) -> Mapping[str, float] | None:
    """Return the weights that a request of vLLM's sets; None where it sets none."""
    return _extra_args(request).get(_SHARES)


def _extra_args(request: Any) -> Mapping[str, Any]:
    params = request.sampling_params
    return (params.extra_args if params is not None else None) or {}
