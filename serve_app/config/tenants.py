"""Tenants as the settings file names them.

Owns names, defaults and bounds; knows nothing of how a tenant is recognised.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

_SHA256_HEX = re.compile(r"[0-9a-f]{64}")
Sha256Hex = Annotated[str, StringConstraints(pattern=rf"^{_SHA256_HEX.pattern}$")]


class TenantConfig(BaseModel):
    """One customer as the settings file names it. ``key_sha256``: hex digests, as ``warmpath keys`` prints them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$", description="shown in metrics")
    key_sha256: list[Sha256Hex] = Field(min_length=1, description="SHA-256 of each of the tenant's API keys")
    cache_share: float = Field(1.0, gt=0, le=1000, description="weight of the tenant's share of each KV pool")
    trust_group: str | None = Field(
        None, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$", description="tenants of one group share all their KV"
    )
