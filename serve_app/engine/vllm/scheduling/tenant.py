"""Tenant, order and scope of requests, and tenants' weights, as plain data in ``extra_args`` for vLLM's core.

Imports no vllm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

from router.protocol.block_hash import HASH_BYTES
from serve_app.cache.prefix.quota import Accounts
from serve_app.fairness.queue import YIELDING_ORDER
from serve_app.fairness.shares import checked_weights

_TENANT = "warmpath.tenant"
_ORDER = "warmpath.order"
_EXPECTED = "warmpath.expected_tokens"
_PUBLIC = "warmpath.public"
_NOT_STORED = "warmpath.not_stored"
_SHARES = "warmpath.tenant_shares"
_OWNER = "warmpath.owner"

HOST_SHARES: WeakSet[Accounts[Any]] = WeakSet()
"""Tenants' accounts of the host memory in this process."""


def tenant_args(tenant: str, order: int = 0, expected_tokens: int = 0) -> dict[str, Any]:
    """Return a request's ``SamplingParams.extra_args`` for its tenant, its place among the tenant's, and its answer."""
    expected = {_EXPECTED: expected_tokens} if expected_tokens else {}
    return {_TENANT: tenant, _ORDER: order, **expected}


def salt_of(root: bytes) -> str:
    """Return vLLM's salt for the hash of a chain's first block: the root, or the public root of a public chain."""
    return root[:HASH_BYTES].hex()


def scope_args(root: bytes, public_tokens: int, *, store_kv: bool = True) -> dict[str, Any]:
    """Return a request's ``extra_args`` for the scope of its blocks; ``root`` as in ``EngineRequest``."""
    public = {_PUBLIC: [public_tokens, root[HASH_BYTES:].hex()]} if public_tokens else {}
    return public if store_kv else {**public, _NOT_STORED: True}


def shares_args(shares: Mapping[str, float]) -> dict[str, Any]:
    """Return ``extra_args`` of a request that sets all tenants' weights. Raises ValueError for an invalid one."""
    return {_SHARES: checked_weights(shares)}


def offload_params(request: Any) -> dict[str, Any]:
    """Return the ``kv_transfer_params`` of vLLM's request: whose its blocks are, and whether they may be offloaded."""
    params = {**(request.kv_transfer_params or {}), _OWNER: (tenant_of(request), public_part(request)[0])}
    return params if stores_kv(request) else {**params, "max_offload_tokens": 0}


def owner_of(params: Mapping[str, Any] | None) -> tuple[str, int]:
    """Return the tenant in ``offload_params``, and the number of tokens at the beginning that are public."""
    tenant, public_tokens = (params or {}).get(_OWNER, ("", 0))
    return str(tenant), int(public_tokens)


def tenant_of(request: Any) -> str:
    """Return the tenant of a ``Request`` of vLLM; "" if it has none."""
    return str(_extra_args(request).get(_TENANT, ""))


def order_of(request: Any) -> int:
    """Return the place of a ``Request`` of vLLM among its tenant's: the lowest starts first."""
    return int(_extra_args(request).get(_ORDER, 0))


def expected_tokens_of(request: Any) -> int:
    """Return the tokens that the client of a ``Request`` of vLLM expects in the answer; 0 if it does not say."""
    return int(_extra_args(request).get(_EXPECTED, 0))


def yields(request: Any) -> bool:
    """Return whether a ``Request`` of vLLM waits for all tenants' others."""
    return order_of(request) >= YIELDING_ORDER


def public_part(request: Any) -> tuple[int, str]:
    """Return the number of public tokens of vLLM's request, and the salt of its private part; (0, "") for none."""
    tokens, salt = _extra_args(request).get(_PUBLIC, (0, ""))
    return tokens, salt


def stores_kv(request: Any) -> bool:
    """Return whether other requests may use the blocks that vLLM's request computes."""
    return not _extra_args(request).get(_NOT_STORED, False)


def tells_prompt(request: Any) -> bool:
    """Return whether vLLM's request asks for the log-probabilities of its prompt's tokens."""
    params = request.sampling_params
    return params is not None and params.prompt_logprobs is not None


def shares_of(request: Any) -> Mapping[str, float] | None:
    """Return the weights that vLLM's request sets; None if it sets none."""
    return _extra_args(request).get(_SHARES)


def _extra_args(request: Any) -> Mapping[str, Any]:
    params = request.sampling_params
    return (params.extra_args if params is not None else None) or {}
