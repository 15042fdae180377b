"""What /v1/cache/state says: replicas, load, bytes and tokens cached, top prefixes, hit rate per tenant.

Owns the shape of that document and the bounded table of prefixes seen by one ingress. Prefixes are named by their
keyed hash, so the document holds no prompt's text.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from router.core import RoutingCore
from serve_app.text_cache import TextCacheStats

REMEMBERED_PREFIXES = 1024
SHOWN_PREFIXES = 20

_GAUGES = {
    ("warmpath_kv_cache_blocks", "used"): "blocks_in_use",
    ("warmpath_kv_cache_blocks", "cached"): "blocks_cached",
    ("warmpath_kv_cache_blocks", "free"): "blocks_free",
    ("warmpath_kv_cache_bytes", "used"): "bytes_in_use",
    ("warmpath_kv_cache_bytes", "cached"): "bytes_cached",
    ("warmpath_kv_cache_bytes", "free"): "bytes_free",
}
_FIELDS = {"warmpath_pinned_blocks": "blocks_pinned", "warmpath_pinned_bytes": "bytes_pinned"}


@dataclass(slots=True)
class _Traffic:
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def add(self, prompt_tokens: int, cached_tokens: int) -> None:
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens

    def to_json(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "hit_rate": round(self.cached_tokens / self.prompt_tokens, 4) if self.prompt_tokens else 0.0,
        }


class TrafficTable:
    """Prompt and cached tokens by tenant, and by placement key for the most recently used prefixes."""

    def __init__(self) -> None:
        self._by_tenant: dict[str, _Traffic] = {}
        self._by_prefix: OrderedDict[tuple[str, bytes], _Traffic] = OrderedDict()

    def add(self, tenant: str, placement_key: bytes, prompt_tokens: int, cached_tokens: int) -> None:
        """Count one generation's first token."""
        self._by_tenant.setdefault(tenant, _Traffic()).add(prompt_tokens, cached_tokens)
        key = (tenant, placement_key)
        self._by_prefix.setdefault(key, _Traffic()).add(prompt_tokens, cached_tokens)
        self._by_prefix.move_to_end(key)
        if len(self._by_prefix) > REMEMBERED_PREFIXES:
            self._by_prefix.popitem(last=False)

    def to_json(self) -> dict[str, Any]:
        """Return hit rates per tenant and the prefixes that saved most."""
        top = sorted(self._by_prefix.items(), key=lambda item: item[1].cached_tokens, reverse=True)[:SHOWN_PREFIXES]
        return {
            "tenants": {tenant: traffic.to_json() for tenant, traffic in self._by_tenant.items()},
            "top_prefixes": [
                {"prefix": key.hex(), "tenant": tenant, **traffic.to_json()} for (tenant, key), traffic in top
            ],
        }


def cache_state(
    core: RoutingCore, traffic: TrafficTable, tokenizer: TextCacheStats, *, model: str, engine: str
) -> dict[str, Any]:
    """Return the document as this ingress sees the app."""
    state = core.state()
    stats = core.stats()
    block_size = state["block_size"]
    for replica in state["replicas"]:
        report = stats.get(replica["replica_id"])
        for name, labels, value in report.samples if report is not None else ():
            of = dict(labels)
            if name == "warmpath_replica_info" and of.get("pid", "").isdecimal():
                replica["pid"] = int(of["pid"])
            if name == "warmpath_tenant_kv_cache_bytes" and "tenant" in of:
                replica.setdefault("bytes_by_tenant", {})[of["tenant"]] = int(value)
            field = _GAUGES.get((name, of.get("state", "")), _FIELDS.get(name))
            if field is not None:
                replica[field] = int(value)
        if "blocks_cached" in replica:
            replica["tokens_cached"] = replica["blocks_cached"] * block_size
    return {
        "model": model,
        "engine": engine,
        **state,
        "tokenizer_cache": {
            "bytes": tokenizer.bytes,
            "max_bytes": tokenizer.capacity_bytes,
            "entries": tokenizer.entries,
            "hits": tokenizer.hits,
            "misses": tokenizer.misses,
        },
        **traffic.to_json(),
    }
