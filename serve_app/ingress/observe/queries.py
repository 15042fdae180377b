"""PromQL for a first dashboard: ten questions that an operator asks, and how to ask them."""

from __future__ import annotations

from typing import NamedTuple


class Query(NamedTuple):
    """``question``: what the answer is good for; ``promql``: one expression."""

    question: str
    promql: str


QUERIES = (
    Query(
        "How long do clients wait for the first token? (p95, seconds; `sum by (le, tenant)` shows whom)",
        "histogram_quantile(0.95, sum by (le) (rate(warmpath_time_to_first_token_seconds_bucket[5m])))",
    ),
    Query(
        "How fast do answers come after that? (p95, seconds a token)",
        "histogram_quantile(0.95, sum by (le) (rate(warmpath_inter_token_latency_seconds_bucket[5m])))",
    ),
    Query(
        "How many requests come, and how do they end? (a second, by HTTP status)",
        'sum by (status) (rate(warmpath_requests_total{endpoint=~"chat|completions"}[5m]))',
    ),
    Query(
        "Which share of the prompts is served from cache? (0 to 1, by tenant)",
        "sum by (tenant) (rate(warmpath_tenant_cached_prompt_tokens_total[5m])) / "
        "sum by (tenant) (rate(warmpath_tenant_prompt_tokens_total[5m]))",
    ),
    Query(
        "What do the replicas do? (tokens generated a second; warmpath_prompt_tokens_computed_total is the prefill)",
        "sum by (replica) (rate(warmpath_generation_tokens_total[5m]))",
    ),
    Query(
        "Does anything wait? (requests, in ingresses and replicas; above 0 for long: too few replicas)",
        "sum(warmpath_requests_waiting) + sum(warmpath_num_requests_waiting)",
    ),
    Query(
        "Is a replica slower than the others? (p95, seconds from arrival there to the first step)",
        "histogram_quantile(0.95, sum by (le, replica) (rate(warmpath_request_queue_time_seconds_bucket[5m])))",
    ),
    Query(
        "How full are the pools of running sequences? (0 to 1; near 1: preemptions, and nothing stays cached)",
        'sum by (replica) (warmpath_kv_cache_blocks{state="used"}) / sum by (replica) (warmpath_kv_cache_blocks)',
    ),
    Query(
        "What do decisions cost in cached tokens? (share of all prompt tokens, by cause)",
        "sum by (cause) (rate(warmpath_router_regret_tokens_total[5m])) / ignoring (cause) group_left () "
        "sum(rate(warmpath_router_prompt_tokens_total[5m]))",
    ),
    Query(
        "Can the estimates be trusted? (median of actual / estimated time to first token; 1 is right)",
        "histogram_quantile(0.5, sum by (le) (rate(warmpath_router_ttft_actual_to_estimated_ratio_bucket[30m])))",
    ),
)
