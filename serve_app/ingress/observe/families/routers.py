"""Families of the routers: one in each ingress. And of the autoscaling policy, which the ingresses show."""

from __future__ import annotations

from serve_app.ingress.observe.families.family import Section, section

SECTIONS: tuple[Section, ...] = (
    section(
        "Routing: decisions",
        "Counted by the router in each ingress, under the policy that acted. Where prefixes are is known from "
        "hints; only `delivered` is what happened.",
        """
warmpath_router_decisions_total: ingress policy reason
    Requests that were given a replica, by policy and why that one.
warmpath_router_replica_decisions_total: ingress replica
    Decisions for each replica that is there now.
warmpath_router_decision_seconds: ingress (histogram)
    Time of one decision.
warmpath_router_prompt_tokens_total: ingress policy reason
    Prompt tokens of the requests that were decided about.
warmpath_router_best_cached_tokens_total: ingress policy reason
    Of those tokens, what the replica with the longest prefix held.
warmpath_router_selected_cached_tokens_total: ingress policy reason
    Of those tokens, what the chosen replica held, as far as the directory knew.
warmpath_router_delivered_cached_tokens_total: ingress policy reason
    Of those tokens, what the chosen replica really reused.
warmpath_router_unpredicted_cached_tokens_total: ingress policy reason
    Reused beyond what the directory knew, as from a prefill that was under way.
warmpath_router_regret_tokens_total: ingress policy reason cause
    Cached tokens that were not used. not_selected: another replica held more, but was busier; evicted: gone
    before the request came; unused: the directory was wrong, or loading would have taken longer than computing.
warmpath_router_all_full_total: ingress
    Decisions that found every replica full; the request waited.
warmpath_router_rejected_total: ingress
    Requests that Serve's replica refused after the decision; decided again.
warmpath_router_sent_back_total: ingress
    Requests that the chosen replica sent back because more was queued there than the router knew; decided
    again.
warmpath_router_faults_total: ingress
    Faults of routing itself; the request went to the least loaded replica. Should be 0.
warmpath_router_open_reservations: ingress
    Work that was sent and is in no load report yet.
warmpath_router_replicas: ingress
    Replicas that this router knows.
warmpath_router_queued_tokens: ingress replica
    Uncached prompt tokens that a next request would wait for at each replica: what it reported, and what was
    sent since. Routing counts with it.
""",
    ),
    section(
        "Routing: estimates against what came",
        "How far the times can be trusted that routing is made from.",
        """
warmpath_router_ttft_actual_to_estimated_ratio: ingress policy (histogram)
    Actual / estimated time from the routing decision to the first token; 1 is a true estimate.
warmpath_router_estimated_ttft_seconds_total: ingress policy
    Sum of the estimates, of requests that got a first token: work in the replica, that before the request
    included, and warmpath_router_ttft_overhead_seconds. Without the ingress' line and tokenizing.
warmpath_router_actual_ttft_seconds_total: ingress policy
    Sum of the actual times of the same requests, from the routing decision to the first token.
warmpath_router_ttft_late_seconds_total: ingress policy
    Of the difference, what first tokens came later than estimated.
warmpath_router_ttft_early_seconds_total: ingress policy
    Of the difference, what first tokens came sooner than estimated.
warmpath_router_ttft_overhead_seconds: ingress
    What a first token takes beside the work, learned from the latest 64 requests: calls, the step under way, a
    step's own cost. Equal for all replicas, so it changes estimates and no decision.
""",
    ),
    section(
        "Routing: directory and feed",
        "What a router knows of the replicas' caches, and how it came.",
        """
warmpath_directory_blocks: ingress
    Distinct blocks that the directory knows, on whatever replicas.
warmpath_directory_max_blocks: ingress
    The bound of warmpath_directory_blocks, a setting.
warmpath_directory_bytes: ingress
    Memory of the directory.
warmpath_directory_refused_blocks_total: ingress
    Hints that the directory had no room for: routing misses those hits.
warmpath_directory_checks_total: ingress
    Comparisons of what the directory knows of a replica with what it holds.
warmpath_directory_drift_total: ingress replica kind
    Of those, where they differed, which a snapshot mends. extra: blocks were known that the replica does not
    hold; missing: it held some that were not known; altered: as many, but others. Should be 0.
warmpath_feed_messages_total: ingress
    Messages from replicas that were read.
warmpath_feed_gaps_total: ingress
    Times that messages were missing, and a snapshot was asked for.
warmpath_feed_snapshots_total: ingress
    Snapshots of a replica's whole cache that were read.
warmpath_feed_malformed_total: ingress
    Messages that were not believed. Should be 0.
""",
    ),
    section(
        "Autoscaling",
        "Only with `autoscaling`; none before the first decision.",
        """
warmpath_autoscaling_target_replicas: reason
    Replicas there are to be, by the latest change and its reason.
warmpath_autoscaling_needed_replicas: reason
    The need it was made from, before delays, bounds and rounding.
""",
    ),
)
