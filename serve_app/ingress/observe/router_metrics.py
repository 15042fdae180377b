"""A router's counters as Prometheus samples.

Owns the names. Every decision is counted three ways in tokens: the best any replica held, what the selected one
held by the directory, and what it then delivered; their differences are regret: the price of load, and of stale hints.
"""

from __future__ import annotations

from typing import Any

from router.core import RoutingCore
from router.observe.counters import PolicyCounters
from router.protocol.samples import Sample


def router_samples(core: RoutingCore) -> list[Sample]:
    """Return what this process's router has counted, and the size of what it remembers."""
    counters = core.counters
    samples: list[Sample] = []
    for policy, counted in list(counters.by_policy.items()):
        samples += _policy_samples(policy, counted)
    for replica_id, decisions in list(counters.decisions_by_replica.items()):
        samples.append(("warmpath_router_replica_decisions_total", (("replica", replica_id),), float(decisions)))
    samples += [
        ("warmpath_directory_drift_total", (("replica", replica_id), ("kind", kind)), float(found))
        for replica_id, kinds in list(core.drift.found.items())
        for kind, found in list(kinds.items())
    ]
    samples += counters.decision_s.samples("warmpath_router_decision_seconds")
    samples += [
        ("warmpath_router_all_full_total", (), float(counters.all_full)),
        ("warmpath_router_faults_total", (), float(counters.faults)),
        ("warmpath_router_rejected_total", (), float(counters.rejected)),
        ("warmpath_router_sent_back_total", (), float(counters.rerouted)),
        ("warmpath_feed_messages_total", (), float(counters.feed.messages)),
        ("warmpath_feed_gaps_total", (), float(counters.feed.gaps)),
        ("warmpath_feed_snapshots_total", (), float(counters.feed.snapshots)),
        ("warmpath_feed_malformed_total", (), float(counters.feed.malformed)),
    ]
    state: dict[str, Any] = core.state()
    directory = state["directory"]
    samples += [
        ("warmpath_directory_blocks", (), float(directory["blocks"])),
        ("warmpath_directory_max_blocks", (), float(directory["max_blocks"])),
        ("warmpath_directory_bytes", (), float(directory["bytes"])),
        ("warmpath_directory_refused_blocks_total", (), float(directory["refused_blocks"])),
        ("warmpath_directory_checks_total", (), float(directory["checks"])),
        ("warmpath_router_ttft_overhead_seconds", (), float(state["ttft_overhead_s"])),
        ("warmpath_router_open_reservations", (), float(state["open_reservations"])),
        ("warmpath_router_replicas", (), float(len(state["replicas"]))),
    ]
    for replica in state["replicas"]:
        labels = (("replica", replica["replica_id"]),)
        samples.append(("warmpath_router_queued_tokens", labels, float(replica["queued_prefill_tokens"])))
    return samples


def replica_samples(core: RoutingCore) -> list[Sample]:
    """Return the latest samples of every replica, with the label ``replica``."""
    return [
        (name, (*labels, ("replica", replica_id)), value)
        for replica_id, report in core.stats().items()
        for name, labels, value in report.samples
    ]


def _policy_samples(policy: str, counted: PolicyCounters) -> list[Sample]:
    samples: list[Sample] = []
    for reason, tokens in list(counted.by_reason.items()):
        labels = (("policy", policy), ("reason", reason))
        samples += [
            ("warmpath_router_decisions_total", labels, float(tokens.decisions)),
            ("warmpath_router_prompt_tokens_total", labels, float(tokens.prompt_tokens)),
            ("warmpath_router_best_cached_tokens_total", labels, float(tokens.best_cached_tokens)),
            ("warmpath_router_selected_cached_tokens_total", labels, float(tokens.selected_cached_tokens)),
            ("warmpath_router_delivered_cached_tokens_total", labels, float(tokens.delivered_cached_tokens)),
            ("warmpath_router_unpredicted_cached_tokens_total", labels, float(tokens.unpredicted_tokens)),
        ]
        regret = {
            "not_selected": tokens.not_selected_tokens,
            "evicted": tokens.evicted_tokens,
            "unused": tokens.unused_tokens,
        }
        samples += [
            ("warmpath_router_regret_tokens_total", (*labels, ("cause", cause)), float(value))
            for cause, value in regret.items()
        ]
    of_policy = (("policy", policy),)
    estimates = counted.estimates
    return [
        *samples,
        *estimates.ratio.samples("warmpath_router_ttft_actual_to_estimated_ratio", of_policy),
        ("warmpath_router_estimated_ttft_seconds_total", of_policy, estimates.estimated_s),
        ("warmpath_router_actual_ttft_seconds_total", of_policy, estimates.actual_s),
        ("warmpath_router_ttft_late_seconds_total", of_policy, estimates.late_s),
        ("warmpath_router_ttft_early_seconds_total", of_policy, estimates.early_s),
    ]
