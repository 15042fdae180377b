"""Whose a request is and what tenants' weights are, as they reach vLLM's core: plain data in ``extra_args``.

Imports no vllm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serve_app.cache.prefix.quota import checked_weights

_TENANT = "warmpath.tenant"
_SHARES = "warmpath.tenant_shares"


def tenant_args(tenant: str) -> dict[str, Any]:
    """Return what a request's ``SamplingParams.extra_args`` say of its tenant."""
    return {_TENANT: tenant}


def shares_args(shares: Mapping[str, float]) -> dict[str, Any]:
    """Return ``extra_args`` of a request that sets every tenant's weight. Raises ValueError for a bad one."""
    return {_SHARES: checked_weights(shares)}


def tenant_of(request: Any) -> str:
    """Return the tenant of one of vLLM's ``Request``s; "" for what is nobody's."""
    return str(_extra_args(request).get(_TENANT, ""))


def shares_of(request: Any) -> Mapping[str, float] | None:
    """Return the weights that a request of vLLM's sets; None where it sets none."""
    return _extra_args(request).get(_SHARES)


def _extra_args(request: Any) -> Mapping[str, Any]:
    params = request.sampling_params
    return (params.extra_args if params is not None else None) or {}
