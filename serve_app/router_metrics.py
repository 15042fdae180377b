"""A router's counters as Prometheus samples.

Owns the names. Every decision is counted three ways in tokens: the best any replica held, what the selected one
held by the directory, and what it then delivered; their differences are the price of load, and of stale hints.
"""

from __future__ import annotations

from typing import Any

from router.core import RoutingCore
from router.counters import Histogram
from serve_app.metrics import Sample


def router_samples(core: RoutingCore) -> list[Sample]:
    """Return what this process's router has counted, and the size of what it remembers."""
    counters = core.counters
    policy = ("policy", core.settings.policy)
    samples: list[Sample] = []
    for reason, tokens in list(counters.by_reason.items()):
        labels = (policy, ("reason", reason))
        samples += [
            ("warmpath_router_decisions_total", labels, float(tokens.decisions)),
            ("warmpath_router_prompt_tokens_total", labels, float(tokens.prompt_tokens)),
            ("warmpath_router_best_cached_tokens_total", labels, float(tokens.best_cached_tokens)),
            ("warmpath_router_selected_cached_tokens_total", labels, float(tokens.selected_cached_tokens)),
            ("warmpath_router_delivered_cached_tokens_total", labels, float(tokens.delivered_cached_tokens)),
        ]
    for replica_id, decisions in list(counters.decisions_by_replica.items()):
        samples.append(("warmpath_router_replica_decisions_total", (("replica", replica_id),), float(decisions)))
    samples += _histogram("warmpath_router_decision_seconds", counters.decision_s)
    samples += _histogram("warmpath_router_time_to_first_token_seconds", counters.ttft_s)
    samples += [
        ("warmpath_router_all_full_total", (), float(counters.all_full)),
        ("warmpath_router_faults_total", (), float(counters.faults)),
        ("warmpath_router_rejected_total", (), float(counters.rejected)),
        ("warmpath_feed_messages_total", (), float(counters.feed_messages)),
        ("warmpath_feed_gaps_total", (), float(counters.feed_gaps)),
        ("warmpath_feed_snapshots_total", (), float(counters.feed_snapshots)),
        ("warmpath_feed_malformed_total", (), float(counters.feed_malformed)),
    ]
    state: dict[str, Any] = core.state()
    directory = state["directory"]
    samples += [
        ("warmpath_directory_blocks", (), float(directory["blocks"])),
        ("warmpath_directory_max_blocks", (), float(directory["max_blocks"])),
        ("warmpath_directory_bytes", (), float(directory["bytes"])),
        ("warmpath_directory_refused_blocks_total", (), float(directory["refused_blocks"])),
        ("warmpath_router_open_reservations", (), float(state["open_reservations"])),
        ("warmpath_router_replicas", (), float(len(state["replicas"]))),
    ]
    return samples


def replica_samples(core: RoutingCore) -> list[Sample]:
    """Return the latest samples of every replica, with the label ``replica``."""
    return [
        (name, (*labels, ("replica", replica_id)), value)
        for replica_id, report in core.stats().items()
        for name, labels, value in report.samples
    ]


def _histogram(name: str, histogram: Histogram) -> list[Sample]:
    rows = histogram.cumulative()
    samples: list[Sample] = [(f"{name}_bucket", (("le", bound),), float(count)) for bound, count in rows]
    return [*samples, (f"{name}_sum", (), histogram.total), (f"{name}_count", (), float(rows[-1][1]))]
