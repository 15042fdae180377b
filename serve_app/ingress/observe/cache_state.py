"""What /v1/cache/state says: replicas, load, bytes and tokens cached, top prefixes, hit rate per tenant.

Prefixes are named by their keyed hash, so the document holds no prompt's text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from router.core import RoutingCore
from router.protocol.samples import Sample
from serve_app.tenants.usage import UsageTable
from serve_app.tokenization.segment_cache import SegmentCacheStats

_STATES = {"used": "in_use", "cached": "cached", "free": "free"}

NOTICES = ("autoscaling", "configuration", "handover", "prewarm")
"""The kinds of notices that are shown: what replicas that may be gone, and the controller, have left behind."""


def cache_state(
    core: RoutingCore,
    traffic: UsageTable,
    tokenizer: SegmentCacheStats,
    notices: dict[str, list[dict[str, Any]]],
    *,
    model: str,
    engine: str,
) -> dict[str, Any]:
    """Return the document as this ingress sees the app."""
    state = core.state()
    stats = core.stats()
    block_size = state["block_size"]
    for replica in state["replicas"]:
        report = stats.get(replica["replica_id"])
        if report is not None:
            replica |= _of_report(report.samples, block_size)
    return {
        "model": model,
        "engine": engine,
        **state,
        "tokenizer_cache": asdict(tokenizer),
        **traffic.to_json(),
        "notices": notices,
    }


def _of_report(samples: Sequence[Sample], block_size: int) -> dict[str, Any]:
    """Return what a replica's samples say of its pool, in blocks, bytes and tokens; it may leave out any."""
    found: dict[str, Any] = {}
    block_bytes = next((int(value) for name, _, value in samples if name == "warmpath_kv_cache_block_bytes"), 0)
    for name, labels, value in samples:
        of = dict(labels)
        match name:
            case "warmpath_replica_info" if of.get("pid", "").isdecimal():
                found["pid"] = int(of["pid"])
            case "warmpath_tenant_kv_cache_blocks" if "tenant" in of:
                found.setdefault("bytes_by_tenant", {})[of["tenant"]] = int(value) * block_bytes
            case "warmpath_kv_cache_blocks" if of.get("state") in _STATES:
                state = _STATES[of["state"]]
                found[f"blocks_{state}"] = int(value)
                found[f"bytes_{state}"] = int(value) * block_bytes
            case "warmpath_pinned_blocks":
                found["blocks_pinned"] = int(value)
                found["bytes_pinned"] = int(value) * block_bytes
    if "blocks_cached" in found:
        found["tokens_cached"] = found["blocks_cached"] * block_size
    return found
