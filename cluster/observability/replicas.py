"""Rows of the dashboard about replicas: their KV pools, what they give each other, what they do."""

from __future__ import annotations

from cluster.observability.panel import Panel, Row, Series, p95, quantiles, rate

POOL = Row(
    "KV pools",
    (
        Panel(
            "Blocks by state",
            "used: of running sequences; cached: reusable; free: empty.",
            "short",
            (Series("sum by (state) (warmpath_kv_cache_blocks)", "{{state}}"),),
        ),
        Panel(
            "Evictions",
            "Blocks a second. Reused ones are what comes back and finds nothing: the pool is too small.",
            "short",
            (
                Series(rate("warmpath_prefix_cache_evicted_blocks_total"), "all"),
                Series(rate("warmpath_prefix_cache_evicted_reused_blocks_total"), "reused before"),
            ),
        ),
        Panel(
            "Blocks by tenant",
            "Running and cached, and those that saves keep.",
            "short",
            (
                Series("sum by (tenant) (warmpath_tenant_kv_cache_blocks)", "{{tenant}}"),
                Series("sum(warmpath_pinned_blocks)", "pinned"),
            ),
        ),
        Panel(
            "Preemptions and computing again",
            "Sequences that gave their blocks back, and tokens that were computed again for it.",
            "short",
            (
                Series(rate("warmpath_num_preemptions_total"), "preemptions a second"),
                Series(rate("warmpath_recomputed_tokens_total"), "tokens a second"),
            ),
        ),
        Panel(
            "Tiers below the pool",
            "Blocks a second brought back and written.",
            "short",
            (
                Series(rate("warmpath_kv_tier_hits_total", "tier"), "{{tier}}: hits"),
                Series(rate("warmpath_kv_tier_stores_total", "tier"), "{{tier}}: stores"),
            ),
            after="a tier is configured",
        ),
    ),
)

MOVES = Row(
    "KV between replicas",
    (
        Panel(
            "Pulls",
            "Prefixes copied from another replica, by how that ended; and planned ones that were not begun.",
            "reqps",
            (
                Series(rate("warmpath_kv_pulls_total", "outcome"), "{{outcome}}"),
                Series(rate("warmpath_kv_pulls_refused_total", "reason"), "refused: {{reason}}"),
            ),
            after="a pull",
        ),
        Panel(
            "Tokens pulled and handed out",
            "A second, over all replicas.",
            "short",
            (
                Series(rate("warmpath_kv_pulled_tokens_total"), "pulled"),
                Series(rate("warmpath_kv_exported_tokens_total"), "handed out"),
            ),
        ),
        Panel(
            "Time of a pull",
            "Of all its pieces.",
            "s",
            quantiles("warmpath_kv_pull_seconds"),
            after="a pull",
        ),
        Panel(
            "Blocks that joining replicas took",
            "Since each replica's start: copied from its peers before it took requests.",
            "short",
            (Series("sum by (kind) (warmpath_prewarm_blocks_total)", "{{kind}}"),),
            after="a replica joins others that hold something",
        ),
        Panel(
            "Blocks handed over by leaving replicas",
            "Taken over by those that stay, and what they had no room for.",
            "short",
            (
                Series("sum by (kind) (warmpath_handover_blocks_total)", "{{kind}}"),
                Series("sum(warmpath_handover_refused_blocks_total)", "refused"),
            ),
            after="a replica that holds something leaves others",
        ),
    ),
)

REPLICAS = Row(
    "Replicas",
    (
        Panel(
            "Replicas, and how many there are to be",
            "As the routers see them, and by the autoscaling policy's latest change with its reason.",
            "short",
            (
                Series("max(warmpath_router_replicas)", "there"),
                Series("max by (reason) (warmpath_autoscaling_target_replicas)", "to be: {{reason}}"),
                Series("max(warmpath_autoscaling_needed_replicas)", "needed"),
            ),
        ),
        Panel(
            "Sequences running",
            "By replica.",
            "short",
            (Series("sum by (replica) (warmpath_num_requests_running)", "{{replica}}"),),
        ),
        Panel(
            "Tokens generated",
            "A second, by replica.",
            "short",
            (Series(rate("warmpath_generation_tokens_total", "replica"), "{{replica}}"),),
        ),
        Panel(
            "Prompt tokens computed",
            "A second, by replica: the real prefill.",
            "short",
            (Series(rate("warmpath_prompt_tokens_computed_total", "replica"), "{{replica}}"),),
        ),
        Panel(
            "Queue time in the replica (p95)",
            "From a sequence's arrival to its first step. One replica above the others: it is slow, or holds too much.",
            "s",
            (p95("warmpath_request_queue_time_seconds", "replica"),),
        ),
        Panel(
            "Prefill time in the replica (p95)",
            "From the first step to the first token.",
            "s",
            (p95("warmpath_request_prefill_time_seconds", "replica"),),
        ),
    ),
)
