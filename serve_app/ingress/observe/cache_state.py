"""What /v1/cache/state says: replicas, load, bytes and tokens cached, top prefixes, hit rate per tenant.

Prefixes are named by their keyed hash, so the document holds no prompt's text.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from router.core import RoutingCore
from serve_app.tenants.usage import UsageTable
from serve_app.tokenization.segment_cache import SegmentCacheStats

_GAUGES = {
    ("warmpath_kv_cache_blocks", "used"): "blocks_in_use",
    ("warmpath_kv_cache_blocks", "cached"): "blocks_cached",
    ("warmpath_kv_cache_blocks", "free"): "blocks_free",
    ("warmpath_kv_cache_bytes", "used"): "bytes_in_use",
    ("warmpath_kv_cache_bytes", "cached"): "bytes_cached",
    ("warmpath_kv_cache_bytes", "free"): "bytes_free",
}
_FIELDS = {"warmpath_pinned_blocks": "blocks_pinned", "warmpath_pinned_bytes": "bytes_pinned"}


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
        "tokenizer_cache": asdict(tokenizer),
        **traffic.to_json(),
        "notices": notices,
    }
