"""Rows of the dashboard about requests: what clients feel, what is reused, and how that was decided."""

from __future__ import annotations

from cluster.observability.panel import Panel, Row, Series, p95, quantiles, rate, share


def _router_share(kind: str) -> Series:
    part = f"warmpath_router_{kind}_cached_tokens_total"
    return Series(share(part, "warmpath_router_prompt_tokens_total"), kind)


CLIENTS = Row(
    "What clients feel",
    (
        Panel(
            "Time to first token",
            "From a request's arrival at the ingress. Simulated engines simulate this time, too.",
            "s",
            quantiles("warmpath_time_to_first_token_seconds"),
        ),
        Panel(
            "Time between tokens",
            "Of all tokens after the first, as they reach the ingress.",
            "s",
            quantiles("warmpath_inter_token_latency_seconds"),
        ),
        Panel(
            "Time to first token by tenant (p95)",
            "One tenant far above the others: its prompts miss the cache, or it waits for its turn.",
            "s",
            (p95("warmpath_time_to_first_token_seconds", "tenant"),),
        ),
        Panel(
            "Requests by status",
            "Answers a second. 499: the client left first.",
            "reqps",
            (Series(rate("warmpath_requests_total", "status"), "{{status}}"),),
        ),
        Panel(
            "Rejections",
            "413, 429 and 503 by tenant; and what replicas refused or sent back, which is decided again.",
            "reqps",
            (
                Series(
                    rate("warmpath_requests_total", "tenant, status", '{status=~"413|429|503"}'),
                    "{{tenant}} {{status}}",
                ),
                Series(rate("warmpath_router_rejected_total"), "rejected by a replica"),
                Series(rate("warmpath_router_sent_back_total"), "sent back by a replica"),
                Series(rate("warmpath_router_all_full_total"), "all replicas full"),
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
                    share(
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
                    share(
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
                    f"{rate('warmpath_router_regret_tokens_total', 'cause')} / ignoring (cause) group_left () "
                    f"{rate('warmpath_router_prompt_tokens_total')}",
                    "{{cause}}",
                ),
            ),
        ),
        Panel(
            "Misses by what differs",
            "Prompts that were computed to a good part, by the first difference from the tenant's earlier ones.",
            "reqps",
            (Series(rate("warmpath_cache_misses_total", "reason"), "{{reason}}"),),
            after="a prompt that resembles an earlier one and was computed",
        ),
        Panel(
            "Reuse by policy's reason",
            "Decisions a second by why a replica was chosen.",
            "reqps",
            (Series(rate("warmpath_router_decisions_total", "reason"), "{{reason}}"),),
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
            quantiles("warmpath_router_ttft_actual_to_estimated_ratio"),
        ),
        Panel(
            "Time of a decision",
            "In the router, a shadow policy's not included.",
            "s",
            quantiles("warmpath_router_decision_seconds"),
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
                Series(rate("warmpath_feed_gaps_total"), "gaps a second"),
                Series(rate("warmpath_feed_snapshots_total"), "snapshots a second"),
                Series(rate("warmpath_feed_malformed_total"), "malformed a second"),
                Series(rate("warmpath_directory_refused_blocks_total"), "blocks refused a second"),
            ),
        ),
        Panel(
            "Drift of the directory",
            "Each replica's cache is compared with what routers know of it; a difference is mended. Checks without any "
            "are as it should be.",
            "short",
            (
                Series(rate("warmpath_directory_checks_total"), "checks a second"),
                Series(rate("warmpath_directory_drift_total", "kind"), "{{kind}} a second"),
                Series(rate("warmpath_feed_mirror_drift_total"), "published wrongly a second"),
            ),
        ),
        Panel(
            "Faults and retries",
            "Faults of routing should be 0. Retries: generations whose replica was lost.",
            "short",
            (
                Series(rate("warmpath_router_faults_total"), "faults of routing"),
                Series(rate("warmpath_request_retries_total", "after_first_token"), "retries, {{after_first_token}}"),
                Series(rate("warmpath_client_disconnects_total"), "clients that left"),
            ),
        ),
    ),
)
