"""A router's counters as Prometheus samples.

Owns the names. Every decision is counted three ways in tokens: the best any replica held, what the selected one
held by the directory, and what it then delivered; their differences are regret: the price of load, and of stale hints.
"""

from __future__ import annotations

from collections.abc import Mapping

from router.core import RoutingCore
from router.observe.counters import PolicyCounters
from router.protocol.samples import Sample

Label = tuple[str, str]


def router_samples(core: RoutingCore) -> list[Sample]:
    """Return what this process's router has counted, and the size of what it remembers."""
    counters, state = core.counters, core.state()
    directory = state["directory"]
    samples = _samples(
        {
            "warmpath_router_all_full_total": counters.all_full,
            "warmpath_router_faults_total": counters.faults,
            "warmpath_router_rejected_total": counters.rejected,
            "warmpath_router_sent_back_total": counters.rerouted,
            "warmpath_feed_messages_total": counters.feed.messages,
            "warmpath_feed_gaps_total": counters.feed.gaps,
            "warmpath_feed_snapshots_total": counters.feed.snapshots,
            "warmpath_feed_malformed_total": counters.feed.malformed,
            "warmpath_directory_blocks": directory["blocks"],
            "warmpath_directory_max_blocks": directory["max_blocks"],
            "warmpath_directory_bytes": directory["bytes"],
            "warmpath_directory_refused_blocks_total": directory["refused_blocks"],
            "warmpath_directory_checks_total": directory["checks"],
            "warmpath_router_ttft_overhead_seconds": state["ttft_overhead_s"],
            "warmpath_router_open_reservations": state["open_reservations"],
            "warmpath_router_replicas": len(state["replicas"]),
        }
    )
    samples += counters.decision_s.samples("warmpath_router_decision_seconds")
    for policy, counted in list(counters.by_policy.items()):
        samples += _policy_samples(counted, ("policy", policy))
    for replica_id, decisions in list(counters.decisions_by_replica.items()):
        samples += _samples({"warmpath_router_replica_decisions_total": decisions}, ("replica", replica_id))
    for replica_id, kinds in list(core.drift.found.items()):
        for kind, times in list(kinds.items()):
            samples += _samples({"warmpath_directory_drift_total": times}, ("replica", replica_id), ("kind", kind))
    for replica in state["replicas"]:
        queued = {"warmpath_router_queued_tokens": replica["queued_prefill_tokens"]}
        samples += _samples(queued, ("replica", replica["replica_id"]))
    return samples


def replica_samples(core: RoutingCore) -> list[Sample]:
    """Return the latest samples of every replica, with the label ``replica``."""
    return [
        (name, (*labels, ("replica", replica_id)), value)
        for replica_id, report in core.stats().items()
        for name, labels, value in report.samples
    ]


def _policy_samples(counted: PolicyCounters, policy: Label) -> list[Sample]:
    samples: list[Sample] = []
    for reason, tokens in list(counted.by_reason.items()):
        counts = {
            "warmpath_router_decisions_total": tokens.decisions,
            "warmpath_router_prompt_tokens_total": tokens.prompt_tokens,
            "warmpath_router_best_cached_tokens_total": tokens.best_cached_tokens,
            "warmpath_router_selected_cached_tokens_total": tokens.selected_cached_tokens,
            "warmpath_router_delivered_cached_tokens_total": tokens.delivered_cached_tokens,
            "warmpath_router_unpredicted_cached_tokens_total": tokens.unpredicted_tokens,
        }
        regret = {
            "not_selected": tokens.not_selected_tokens,
            "evicted": tokens.evicted_tokens,
            "unused": tokens.unused_tokens,
        }
        samples += _samples(counts, policy, ("reason", reason))
        for cause, lost in regret.items():
            labels = (policy, ("reason", reason), ("cause", cause))
            samples += _samples({"warmpath_router_regret_tokens_total": lost}, *labels)
    estimates = counted.estimates
    sums = {
        "warmpath_router_estimated_ttft_seconds_total": estimates.estimated_s,
        "warmpath_router_actual_ttft_seconds_total": estimates.actual_s,
        "warmpath_router_ttft_late_seconds_total": estimates.late_s,
        "warmpath_router_ttft_early_seconds_total": estimates.early_s,
    }
    ratios = estimates.ratio.samples("warmpath_router_ttft_actual_to_estimated_ratio", (policy,))
    return [*samples, *ratios, *_samples(sums, policy)]


def _samples(values: Mapping[str, float], *labels: Label) -> list[Sample]:
    return [(name, labels, float(value)) for name, value in values.items()]
