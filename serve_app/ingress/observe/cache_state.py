"""What /v1/cache/state says: replicas, load, bytes and tokens cached, top prefixes, hit rate per tenant.

Prefixes are named by their keyed hash, so the document holds no prompt's text.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from router.core import RoutingCore
from router.protocol.samples import Sample
from serve_app.tokenization.segment_cache import SegmentCacheStats

REMEMBERED_PREFIXES = 1024
SHOWN_PREFIXES = 20
_STATES = {"used": "in_use", "cached": "cached", "free": "free"}

NOTICES = ("autoscaling", "configuration", "handover", "prewarm")
"""The kinds of notices that are shown: what replicas that may be gone, and the controller, have left behind."""


@dataclass(slots=True)
class _Reuse:
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


class HitRates:
    """Prompt and cached tokens by tenant, and by placement key for the most recently used prefixes."""

    def __init__(self) -> None:
        self._by_tenant: dict[str, _Reuse] = {}
        self._by_prefix: OrderedDict[tuple[str, bytes], _Reuse] = OrderedDict()

    def add(self, tenant: str, placement_key: bytes, prompt_tokens: int, cached_tokens: int) -> None:
        """Count one generation's first token."""
        key = (tenant, placement_key)
        self._by_tenant.setdefault(tenant, _Reuse()).add(prompt_tokens, cached_tokens)
        self._by_prefix.setdefault(key, _Reuse()).add(prompt_tokens, cached_tokens)
        self._by_prefix.move_to_end(key)
        if len(self._by_prefix) > REMEMBERED_PREFIXES:
            self._by_prefix.popitem(last=False)

    def to_json(self) -> dict[str, Any]:
        """Return hit rates per tenant and the prefixes that saved most."""
        top = sorted(self._by_prefix.items(), key=lambda item: item[1].cached_tokens, reverse=True)[:SHOWN_PREFIXES]
        return {
            "tenants": {tenant: reuse.to_json() for tenant, reuse in self._by_tenant.items()},
            "top_prefixes": [
                {"prefix": key.hex(), "tenant": tenant, **reuse.to_json()} for (tenant, key), reuse in top
            ],
        }


def cache_state(
    core: RoutingCore,
    hit_rates: HitRates,
    tokenizer: SegmentCacheStats,
    notices: dict[str, list[dict[str, Any]]],
    *,
    model: str,
    engine: str,
) -> dict[str, Any]:
    """Return the document as this ingress sees the app."""
    state, stats = core.state(), core.stats()
    for replica in state["replicas"]:
        report = stats.get(replica["replica_id"])
        if report is not None:
            replica |= _of_report(report.samples, state["block_size"])
    return {
        "model": model,
        "engine": engine,
        **state,
        "tokenizer_cache": asdict(tokenizer),
        **hit_rates.to_json(),
        "notices": notices,
    }


def _of_report(samples: Sequence[Sample], block_size: int) -> dict[str, Any]:
    """Return what a replica's samples say of its pool, in blocks, bytes and tokens; it may leave out any."""
    shown: dict[str, Any] = {}
    block_bytes = next((int(value) for name, _, value in samples if name == "warmpath_kv_cache_block_bytes"), 0)
    for name, labels, value in samples:
        label = dict(labels)
        match name:
            case "warmpath_replica_info" if label.get("pid", "").isdecimal():
                shown["pid"] = int(label["pid"])
            case "warmpath_tenant_kv_cache_blocks" if "tenant" in label:
                shown.setdefault("bytes_by_tenant", {})[label["tenant"]] = int(value) * block_bytes
            case "warmpath_kv_cache_blocks" if label.get("state") in _STATES:
                state = _STATES[label["state"]]
                shown[f"blocks_{state}"] = int(value)
                shown[f"bytes_{state}"] = int(value) * block_bytes
            case "warmpath_pinned_blocks":
                shown["blocks_pinned"] = int(value)
                shown["bytes_pinned"] = int(value) * block_bytes
    if "blocks_cached" in shown:
        shown["tokens_cached"] = shown["blocks_cached"] * block_size
    return shown
