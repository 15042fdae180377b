"""Families of the routers: one in each ingress. And of the autoscaling policy, which the ingresses show."""

from __future__ import annotations

from serve_app.ingress.observe.families.family import Family, Section


def _of(name: str, help_text: str, *labels: str, histogram: bool = False) -> Family:
    return Family(name, help_text, ("ingress", *labels), histogram)


_DECISIONS = (
    _of(
        "warmpath_router_decisions_total",
        "Requests that were given a replica, by policy and why that one.",
        "policy",
        "reason",
    ),
    _of("warmpath_router_replica_decisions_total", "Decisions for each replica that is there now.", "replica"),
    _of("warmpath_router_decision_seconds", "Time of one decision.", histogram=True),
    _of(
        "warmpath_router_prompt_tokens_total",
        "Prompt tokens of the requests that were decided about.",
        "policy",
        "reason",
    ),
    _of(
        "warmpath_router_best_cached_tokens_total",
        "Of those tokens, what the replica with the longest prefix held.",
        "policy",
        "reason",
    ),
    _of(
        "warmpath_router_selected_cached_tokens_total",
        "Of those tokens, what the chosen replica held, as far as the directory knew.",
        "policy",
        "reason",
    ),
    _of(
        "warmpath_router_delivered_cached_tokens_total",
        "Of those tokens, what the chosen replica really reused.",
        "policy",
        "reason",
    ),
    _of(
        "warmpath_router_unpredicted_cached_tokens_total",
        "Reused beyond what the directory knew, as from a prefill that was under way.",
        "policy",
        "reason",
    ),
    _of(
        "warmpath_router_regret_tokens_total",
        "Cached tokens that were not used. not_selected: another replica held more, but was busier; evicted: gone "
        "before the request came; unused: the directory was wrong, or loading would have taken longer than computing.",
        "policy",
        "reason",
        "cause",
    ),
    _of("warmpath_router_all_full_total", "Decisions that found every replica full; the request waited."),
    _of("warmpath_router_rejected_total", "Requests that Serve's replica refused after the decision; decided again."),
    _of(
        "warmpath_router_sent_back_total",
        "Requests that the chosen replica sent back because more was queued there than the router knew; decided again.",
    ),
    _of(
        "warmpath_router_faults_total",
        "Faults of routing itself; the request went to the least loaded replica. Should be 0.",
    ),
    _of("warmpath_router_open_reservations", "Work that was sent and is in no load report yet."),
    _of("warmpath_router_replicas", "Replicas that this router knows."),
    _of(
        "warmpath_router_queued_tokens",
        "Uncached prompt tokens that a next request would wait for at each replica: what it reported, and what was "
        "sent since. Routing counts with it.",
        "replica",
    ),
)
_ESTIMATES = (
    _of(
        "warmpath_router_ttft_actual_to_estimated_ratio",
        "Actual / estimated time from the routing decision to the first token; 1 is a true estimate.",
        "policy",
        histogram=True,
    ),
    _of(
        "warmpath_router_estimated_ttft_seconds_total",
        "Sum of the estimates, of requests that got a first token: work in the replica, that before the request "
        "included, and warmpath_router_ttft_overhead_seconds. Without the ingress' line and tokenizing.",
        "policy",
    ),
    _of(
        "warmpath_router_actual_ttft_seconds_total",
        "Sum of the actual times of the same requests, from the routing decision to the first token.",
        "policy",
    ),
    _of(
        "warmpath_router_ttft_late_seconds_total",
        "Of the difference, what first tokens came later than estimated.",
        "policy",
    ),
    _of(
        "warmpath_router_ttft_early_seconds_total",
        "Of the difference, what first tokens came sooner than estimated.",
        "policy",
    ),
    _of(
        "warmpath_router_ttft_overhead_seconds",
        "What a first token takes beside the work, learned from the latest 64 requests: calls, the step under way, a "
        "step's own cost. Equal for all replicas, so it changes estimates and no decision.",
    ),
)
_DIRECTORY = (
    _of("warmpath_directory_blocks", "Distinct blocks that the directory knows, on whatever replicas."),
    _of("warmpath_directory_max_blocks", "The bound of warmpath_directory_blocks, a setting."),
    _of("warmpath_directory_bytes", "Memory of the directory."),
    _of(
        "warmpath_directory_refused_blocks_total",
        "Hints that the directory had no room for: routing misses those hits.",
    ),
    _of("warmpath_directory_checks_total", "Comparisons of what the directory knows of a replica with what it holds."),
    _of(
        "warmpath_directory_drift_total",
        "Of those, where they differed, which a snapshot mends. extra: blocks were known that the replica does not "
        "hold; missing: it held some that were not known; altered: as many, but others. Should be 0.",
        "replica",
        "kind",
    ),
    _of("warmpath_feed_messages_total", "Messages from replicas that were read."),
    _of("warmpath_feed_gaps_total", "Times that messages were missing, and a snapshot was asked for."),
    _of("warmpath_feed_snapshots_total", "Snapshots of a replica's whole cache that were read."),
    _of("warmpath_feed_malformed_total", "Messages that were not believed. Should be 0."),
)
_AUTOSCALING = (
    Family(
        "warmpath_autoscaling_target_replicas",
        "Replicas there are to be, by the latest change and its reason.",
        ("reason",),
    ),
    Family(
        "warmpath_autoscaling_needed_replicas",
        "The need it was made from, before delays, bounds and rounding.",
        ("reason",),
    ),
)
SECTIONS = (
    Section(
        "Routing: decisions",
        "Counted by the router in each ingress, under the policy that acted. Where prefixes are is known from hints; "
        "only `delivered` is what happened.",
        _DECISIONS,
    ),
    Section(
        "Routing: estimates against what came",
        "How far the times can be trusted that routing is made from.",
        _ESTIMATES,
    ),
    Section("Routing: directory and feed", "What a router knows of the replicas' caches, and how it came.", _DIRECTORY),
    Section("Autoscaling", "Only with `autoscaling`; none before the first decision.", _AUTOSCALING),
)
