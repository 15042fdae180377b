"""The document of /v1/cache/state: replicas, load, cached bytes and tokens, hit rates. It holds no prompt's text."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from router.core import RoutingCore
from router.protocol.samples import Sample
from serve_app.live.tally import Total
from serve_app.tokenization.segment_cache import SegmentCacheStats

_STATES = {"used": "in_use", "cached": "cached", "free": "free"}


def cache_state(
    core: RoutingCore,
    totals: Mapping[str, Total],
    tokenizer: SegmentCacheStats,
    notices: dict[str, list[dict[str, Any]]],
    *,
    model: str,
    engine: str,
) -> dict[str, Any]:
    """Return the document from this ingress' view of the app."""
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
        "tenants": {tenant: _of_tenant(*total) for tenant, total in totals.items()},
        "notices": notices,
    }


def _of_tenant(requests: int, prompt_tokens: int, cached_tokens: int) -> dict[str, Any]:
    counts = {"requests": requests, "prompt_tokens": prompt_tokens, "cached_tokens": cached_tokens}
    return {**counts, "hit_rate": round(cached_tokens / prompt_tokens, 4) if prompt_tokens else 0.0}


def _of_report(samples: Sequence[Sample], block_size: int) -> dict[str, Any]:
    """Return a replica's pool in blocks, bytes and tokens from its samples, any of which may be missing."""
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
