"""The dashboard as a table: what each panel asks, in rows from what clients feel to what replicas do.

Knows neither Grafana's format (``grafana.py``) nor an instance. ``tests/cluster/observability/`` holds every query
against the catalog of families, and against a real Prometheus.
"""

from __future__ import annotations

from dataclasses import dataclass

WINDOW = "$__rate_interval"
"""Grafana's own window: at least four scrapes, and no shorter than a step of the graph."""


@dataclass(frozen=True, slots=True)
class Series:
    """``legend``: in Grafana's form, ``{{label}}`` for a label's value."""

    promql: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """``unit``: in Grafana's words. ``after``: what must have happened before it shows anything, "" for requests."""

    title: str
    text: str
    unit: str
    series: tuple[Series, ...]
    after: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels about one thing."""

    title: str
    panels: tuple[Panel, ...]


def _rate(name: str, by: str = "", where: str = "") -> str:
    """Return a counter's rate, summed."""
    summed = f"sum by ({by})" if by else "sum"
    return f"{summed} (rate({name}{where}[{WINDOW}]))"


def _share(part: str, whole: str, by: str = "") -> str:
    """Return one counter's rate as a share of another's."""
    return f"{_rate(part, by)} / {_rate(whole, by)}"


def _quantiles(name: str) -> tuple[Series, ...]:
    return tuple(
        Series(f"histogram_quantile({quantile}, {_rate(f'{name}_bucket', 'le')})", legend)
        for quantile, legend in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
    )


def _p95(name: str, by: str) -> Series:
    return Series(f"histogram_quantile(0.95, {_rate(f'{name}_bucket', f'le, {by}')})", "{{" + by + "}}")


def _router_share(kind: str) -> Series:
    part = f"warmpath_router_{kind}_cached_tokens_total"
    return Series(_share(part, "warmpath_router_prompt_tokens_total"), kind)


CLIENTS = Row(
    "What clients feel",
    (
        Panel(
            "Time to first token",
            "From a request's arrival at the ingress. Simulated engines simulate this time, too.",
            "s",
            _quantiles("warmpath_time_to_first_token_seconds"),
        ),
        Panel(
            "Time between tokens",
            "Of all tokens after the first, as they reach the ingress.",
            "s",
            _quantiles("warmpath_inter_token_latency_seconds"),
        ),
        Panel(
            "Time to first token by tenant (p95)",
            "One tenant far above the others: its prompts miss the cache, or it waits for its turn.",
            "s",
            (_p95("warmpath_time_to_first_token_seconds", "tenant"),),
        ),
        Panel(
            "Requests by status",
            "Answers a second. 499: the client left first.",
            "reqps",
            (Series(_rate("warmpath_requests_total", "status"), "{{status}}"),),
        ),
        Panel(
            "Rejections",
            "413, 429 and 503 by tenant; and what replicas refused or sent back, which is decided again.",
            "reqps",
            (
                Series(
                    _rate("warmpath_requests_total", "tenant, status", '{status=~"413|429|503"}'),
                    "{{tenant}} {{status}}",
                ),
                Series(_rate("warmpath_router_rejected_total"), "rejected by a replica"),
                Series(_rate("warmpath_router_sent_back_total"), "sent back by a replica"),
                Series(_rate("warmpath_router_all_full_total"), "all replicas full"),
            ),
        ),
        Panel(
            "Requests waiting",
            "In the ingresses' lines by tenant, and in replicas. Above 0 for long: too few replicas.",
            "short",
            (
                Series("sum by (tenant) (warmpath_requests_waiting)", "ingress: {{tenant}}"),
                Series("sum(warmpath_num_requests_waiting)", "replicas"),
            ),
        ),
    ),
)

CACHE = Row(
    "What is reused",
    (
        Panel(
            "Hit rate by tenant",
            "Prompt tokens served from cache, of all prompt tokens.",
            "percentunit",
            (
                Series(
                    _share(
                        "warmpath_tenant_cached_prompt_tokens_total", "warmpath_tenant_prompt_tokens_total", "tenant"
                    ),
                    "{{tenant}}",
                ),
            ),
        ),
        Panel(
            "Hit rate by prompt version",
            "Of requests with prompt_ref. A new version that was not warmed starts at 0.",
            "percentunit",
            (
                Series(
                    _share(
                        "warmpath_prompt_version_cached_tokens_total", "warmpath_prompt_version_tokens_total", "prompt"
                    ),
                    "{{prompt}}",
                ),
            ),
            after="a request with prompt_ref",
        ),
        Panel(
            "Best, selected, delivered",
            "Shares of all prompt tokens: what the best replica held, what the chosen one held, what it really reused. "
            "Gaps between the lines are the next panel.",
            "percentunit",
            tuple(_router_share(kind) for kind in ("best", "selected", "delivered")),
        ),
        Panel(
            "Why cached tokens were not used",
            "Shares of all prompt tokens. not_selected: the holder was busier; evicted: gone before the request came; "
            "unused: the directory was wrong, or loading would have taken longer than computing.",
            "percentunit",
            (
                Series(
                    f"{_rate('warmpath_router_regret_tokens_total', 'cause')} / ignoring (cause) group_left () "
                    f"{_rate('warmpath_router_prompt_tokens_total')}",
                    "{{cause}}",
                ),
            ),
        ),
        Panel(
            "Misses by what differs",
            "Prompts that were computed to a good part, by the first difference from the tenant's earlier ones.",
            "reqps",
            (Series(_rate("warmpath_cache_misses_total", "reason"), "{{reason}}"),),
            after="a prompt that resembles an earlier one and was computed",
        ),
        Panel(
            "Reuse by policy's reason",
            "Decisions a second by why a replica was chosen.",
            "reqps",
            (Series(_rate("warmpath_router_decisions_total", "reason"), "{{reason}}"),),
        ),
    ),
)

ROUTING = Row(
    "Routing",
    (
        Panel(
            "Queue in uncached tokens",
            "What a next request would wait for at each replica, as the routers believe.",
            "short",
            (Series("max by (replica) (warmpath_router_queued_tokens)", "{{replica}}"),),
        ),
        Panel(
            "Estimates: actual / estimated time to first token",
            "1 is a true estimate.",
            "short",
            _quantiles("warmpath_router_ttft_actual_to_estimated_ratio"),
        ),
        Panel(
            "Time of a decision",
            "In the router, a shadow policy's not included.",
            "s",
            _quantiles("warmpath_router_decision_seconds"),
        ),
        Panel(
            "Directory and feed",
            "Blocks that the directory knows, by ingress.",
            "short",
            (Series("sum by (ingress) (warmpath_directory_blocks)", "{{ingress}}"),),
        ),
        Panel(
            "Feed: gaps, snapshots, what was not believed",
            "Of all routers. Snapshots without gaps: replicas or ingresses that join.",
            "short",
            (
                Series(_rate("warmpath_feed_gaps_total"), "gaps a second"),
                Series(_rate("warmpath_feed_snapshots_total"), "snapshots a second"),
                Series(_rate("warmpath_feed_malformed_total"), "malformed a second"),
                Series(_rate("warmpath_directory_refused_blocks_total"), "blocks refused a second"),
            ),
        ),
        Panel(
            "Drift of the directory",
            "Each replica's cache is compared with what routers know of it; a difference is mended. Checks without any "
            "are as it should be.",
            "short",
            (
                Series(_rate("warmpath_directory_checks_total"), "checks a second"),
                Series(_rate("warmpath_directory_drift_total", "kind"), "{{kind}} a second"),
                Series(_rate("warmpath_feed_mirror_drift_total"), "published wrongly a second"),
            ),
        ),
        Panel(
            "Faults and retries",
            "Faults of routing should be 0. Retries: generations whose replica was lost.",
            "short",
            (
                Series(_rate("warmpath_router_faults_total"), "faults of routing"),
                Series(_rate("warmpath_request_retries_total", "after_first_token"), "retries, {{after_first_token}}"),
                Series(_rate("warmpath_client_disconnects_total"), "clients that left"),
            ),
        ),
    ),
)

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
                Series(_rate("warmpath_prefix_cache_evicted_blocks_total"), "all"),
                Series(_rate("warmpath_prefix_cache_evicted_reused_blocks_total"), "reused before"),
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
                Series(_rate("warmpath_num_preemptions_total"), "preemptions a second"),
                Series(_rate("warmpath_recomputed_tokens_total"), "tokens a second"),
            ),
        ),
        Panel(
            "Tiers below the pool",
            "Blocks a second brought back and written.",
            "short",
            (
                Series(_rate("warmpath_kv_tier_hits_total", "tier"), "{{tier}}: hits"),
                Series(_rate("warmpath_kv_tier_stores_total", "tier"), "{{tier}}: stores"),
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
                Series(_rate("warmpath_kv_pulls_total", "outcome"), "{{outcome}}"),
                Series(_rate("warmpath_kv_pulls_refused_total", "reason"), "refused: {{reason}}"),
            ),
            after="a pull",
        ),
        Panel(
            "Tokens pulled and handed out",
            "A second, over all replicas.",
            "short",
            (
                Series(_rate("warmpath_kv_pulled_tokens_total"), "pulled"),
                Series(_rate("warmpath_kv_exported_tokens_total"), "handed out"),
            ),
        ),
        Panel(
            "Time of a pull",
            "Of all its pieces.",
            "s",
            _quantiles("warmpath_kv_pull_seconds"),
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
            (Series(_rate("warmpath_generation_tokens_total", "replica"), "{{replica}}"),),
        ),
        Panel(
            "Prompt tokens computed",
            "A second, by replica: the real prefill.",
            "short",
            (Series(_rate("warmpath_prompt_tokens_computed_total", "replica"), "{{replica}}"),),
        ),
        Panel(
            "Queue time in the replica (p95)",
            "From a sequence's arrival to its first step. One replica above the others: it is slow, or holds too much.",
            "s",
            (_p95("warmpath_request_queue_time_seconds", "replica"),),
        ),
        Panel(
            "Prefill time in the replica (p95)",
            "From the first step to the first token.",
            "s",
            (_p95("warmpath_request_prefill_time_seconds", "replica"),),
        ),
    ),
)

ROWS = (CLIENTS, CACHE, ROUTING, POOL, MOVES, REPLICAS)
