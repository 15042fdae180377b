"""A router's state and counters as JSON-able documents. The caller holds the lock of the objects that it passes in."""

import re
from collections.abc import Collection
from dataclasses import asdict
from math import isfinite
from typing import Any

from router.directory.directory import Directory
from router.directory.drift import DriftChecks
from router.load.load_table import LoadTable
from router.observe.counters import RouterCounters
from router.protocol.events import StatsReport

MAX_SAMPLES = 10_000
_METRIC_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_ESTIMATES = ("estimated_s", "actual_s", "late_s", "early_s")
_LABEL_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


def sane_stats(report: StatsReport) -> StatsReport:
    """Return a report without the samples that a metrics page cannot show. A replica's report is not trusted."""
    return StatsReport(
        tuple(
            (name, labels, value)
            for name, labels, value in report.samples[:MAX_SAMPLES]
            if _METRIC_NAME.fullmatch(name)
            and isfinite(value)
            and all(_LABEL_NAME.fullmatch(label) for label, _ in labels)
        )
    )


def router_state(
    directory: Directory, drift: DriftChecks, loads: LoadTable, away: Collection[str], now_s: float
) -> dict[str, Any]:
    """Return the JSON-able state of a router. ``away``: replicas that it remembers but sends no requests."""
    return {
        "block_size": directory.block_size,
        "directory": {
            "blocks": directory.num_blocks,
            "max_blocks": directory.max_blocks,
            "bytes": directory.size_bytes,
            "refused_blocks": directory.refused_blocks,
            "checks": drift.checks,
        },
        "open_reservations": loads.open_reservations,
        "replicas": [
            {
                "replica_id": replica_id,
                "away": replica_id in away,
                "blocks": dict(directory.blocks_held(replica_id)),
                "drift": dict(drift.differences.get(replica_id, {})),
            }
            | replica_load_state(replica_id, loads, now_s)
            for replica_id in loads.replica_ids
        ],
    }


def replica_load_state(replica_id: str, loads: LoadTable, now_s: float) -> dict[str, Any]:
    """Return a known replica's load, JSON-able."""
    replica = loads.replicas[replica_id]
    report = replica.report
    return {
        "queued_prefill_tokens": loads.queue_ahead(replica_id),
        "full": loads.is_full(replica_id),
        "running_sequences": report.running_sequences,
        "waiting_sequences": report.waiting_sequences,
        "prefill_tokens_per_s": report.prefill_tokens_per_s,
        "attributes": report.attributes,
        "report_age_s": None if replica.reported_at_s is None else round(now_s - replica.reported_at_s, 3),
    }


def regret_state(counters: RouterCounters) -> dict[str, Any]:
    """Return by policy the cached tokens that its decisions lost, by reason, and the errors of its TTFT estimates."""
    return {
        policy: {
            "decisions": sum(tokens.decisions for tokens in counted.by_reason.values()),
            "by_reason": {
                reason: {**asdict(tokens), "not_selected_tokens": tokens.not_selected_tokens}
                for reason, tokens in counted.by_reason.items()
            },
            "ttft": {
                "requests": counted.estimates.ratio.count,
                **{name: round(getattr(counted.estimates, name), 6) for name in _ESTIMATES},
            },
        }
        for policy, counted in counters.by_policy.items()
    }
