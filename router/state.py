"""What a router knows, as a document: the directory's size, and each replica's blocks and load.

Pure functions over a directory and a load table. The caller holds whatever lock guards them.
"""

from __future__ import annotations

from typing import Any

from router.directory import Directory
from router.load import LoadTable


def router_state(directory: Directory, loads: LoadTable, now_s: float) -> dict[str, Any]:
    """Return the JSON-able state of a router."""
    return {
        "block_size": directory.block_size,
        "directory": {
            "blocks": directory.num_blocks,
            "max_blocks": directory.max_blocks,
            "bytes": directory.size_bytes,
            "refused_blocks": directory.refused_blocks,
        },
        "open_reservations": loads.open_reservations,
        "replicas": [
            {"replica_id": replica_id, "blocks": dict(directory.blocks_held(replica_id))}
            | load_state(replica_id, loads, now_s)
            for replica_id in loads.replica_ids
        ],
    }


def load_state(replica_id: str, loads: LoadTable, now_s: float) -> dict[str, Any]:
    """Return how busy a known replica is, JSON-able."""
    replica = loads.replica(replica_id)
    assert replica is not None
    report = replica.report
    return {
        "queued_prefill_tokens": loads.queue_ahead(replica_id),
        "full": loads.is_full(replica_id),
        "running_sequences": report.running_sequences if report else 0,
        "waiting_sequences": report.waiting_sequences if report else 0,
        "prefill_tokens_per_s": report.prefill_tokens_per_s if report else 0.0,
        "report_age_s": round(now_s - replica.reported_at_s, 3) if report else None,
    }
