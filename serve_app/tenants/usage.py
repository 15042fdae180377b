"""Prompt and cached tokens by tenant and by prefix, as one ingress saw them.

Owns the bounded table. Prefixes are named by their keyed hash, so the table holds no prompt's text.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import asdict, dataclass
from typing import Any

REMEMBERED_PREFIXES = 1024
SHOWN_PREFIXES = 20


@dataclass(slots=True)
class _Usage:
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def add(self, prompt_tokens: int, cached_tokens: int) -> None:
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens

    def to_json(self) -> dict[str, Any]:
        hit_rate = round(self.cached_tokens / self.prompt_tokens, 4) if self.prompt_tokens else 0.0
        return {**asdict(self), "hit_rate": hit_rate}


class UsageTable:
    """Prompt and cached tokens by tenant, and by placement key for the most recently used prefixes."""

    def __init__(self) -> None:
        self._by_tenant: dict[str, _Usage] = {}
        self._by_prefix: OrderedDict[tuple[str, bytes], _Usage] = OrderedDict()

    def add(self, tenant: str, placement_key: bytes, prompt_tokens: int, cached_tokens: int) -> None:
        """Count one generation's first token."""
        self._by_tenant.setdefault(tenant, _Usage()).add(prompt_tokens, cached_tokens)
        key = (tenant, placement_key)
        self._by_prefix.setdefault(key, _Usage()).add(prompt_tokens, cached_tokens)
        self._by_prefix.move_to_end(key)
        if len(self._by_prefix) > REMEMBERED_PREFIXES:
            self._by_prefix.popitem(last=False)

    def to_json(self) -> dict[str, Any]:
        """Return hit rates per tenant and the prefixes that saved most."""
        top = sorted(self._by_prefix.items(), key=lambda item: item[1].cached_tokens, reverse=True)[:SHOWN_PREFIXES]
        return {
            "tenants": {tenant: usage.to_json() for tenant, usage in self._by_tenant.items()},
            "top_prefixes": [
                {"prefix": key.hex(), "tenant": tenant, **usage.to_json()} for (tenant, key), usage in top
            ],
        }
