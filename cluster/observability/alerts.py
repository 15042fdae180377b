"""When somebody is called, as a table. Thresholds are starting points: what is normal differs by model and machine.

``tests/cluster/observability/alerts_test.yaml`` says for each what makes it fire and what does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Alert:
    """``for_time``: how long it must hold. ``page``: somebody is to look now; ``ticket``: this week."""

    name: str
    promql: str
    for_time: str
    severity: Literal["page", "ticket"]
    summary: str
    what_to_do: str


ALERTS = (
    Alert(
        "WarmpathDown",
        'up{job="warmpath"} == 0',
        "1m",
        "page",
        "No metrics from {{ $labels.instance }}.",
        "See `warmpath serve`'s log, or `kubectl get rayservice`. With tenants configured /metrics needs a key.",
    ),
    Alert(
        "WarmpathSlowFirstToken",
        "histogram_quantile(0.95, sum by (le) (rate(warmpath_time_to_first_token_seconds_bucket[5m]))) > 5",
        "10m",
        "page",
        "One in 20 requests waits more than 5 s for its first token.",
        "See requests waiting, the queue in uncached tokens, and the hit rate: too few replicas, or prompts that miss.",
    ),
    Alert(
        "WarmpathErrors",
        'sum(rate(warmpath_requests_total{status=~"5.."}[5m])) / sum(rate(warmpath_requests_total[5m])) > 0.05',
        "5m",
        "page",
        "One in 20 requests ends with a 5xx.",
        "503: replicas are missing or lines are full, the log says which; 500: it has the fault by the request's id.",
    ),
    Alert(
        "WarmpathRejecting",
        'sum by (tenant) (rate(warmpath_requests_total{status="429"}[10m])) '
        "/ sum by (tenant) (rate(warmpath_requests_total[10m])) > 0.1",
        "10m",
        "ticket",
        "One in ten requests of {{ $labels.tenant }} is refused with 429.",
        "Its limits are too low for what it sends, or the line is full: see requests waiting.",
    ),
    Alert(
        "WarmpathQueueLong",
        "sum(max by (replica) (warmpath_router_queued_tokens)) / sum(warmpath_prefill_tokens_per_second) > 10",
        "5m",
        "page",
        "Over 10 s of prefill are queued at the average replica.",
        "More replicas (or a higher max_replicas); if one replica's queue is long alone, see its queue time.",
    ),
    Alert(
        "WarmpathHitRateFell",
        "sum(rate(warmpath_tenant_cached_prompt_tokens_total[15m])) "
        "/ sum(rate(warmpath_tenant_prompt_tokens_total[15m])) "
        "< 0.5 * sum(rate(warmpath_tenant_cached_prompt_tokens_total[1d])) "
        "/ sum(rate(warmpath_tenant_prompt_tokens_total[1d]))",
        "15m",
        "ticket",
        "The share of prompt tokens from the cache is less than half of the last day's.",
        "Misses by what differs say whether prompts changed; evictions of reused blocks whether the pool is too small.",
    ),
    Alert(
        "WarmpathPoolTooSmall",
        "sum(increase(warmpath_prefix_cache_evicted_reused_blocks_total[1h])) > 0.5 * sum(warmpath_kv_cache_blocks)",
        "30m",
        "ticket",
        "Half a pool of reused blocks is evicted every hour.",
        "Give kv_cache_bytes or a tier below the pool more; `warmpath plan` says how much the traffic needs.",
    ),
    Alert(
        "WarmpathPreempting",
        "sum by (replica) (increase(warmpath_num_preemptions_total[10m])) > 10",
        "10m",
        "ticket",
        "{{ $labels.replica }} takes running sequences' blocks back.",
        "Sequences do not fit: lower max_num_seqs or give the pool more.",
    ),
    Alert(
        "WarmpathReplicasMissing",
        "max(warmpath_router_replicas) < max(warmpath_autoscaling_target_replicas)",
        "15m",
        "page",
        "Fewer replicas than the policy wants, for a quarter of an hour.",
        "The cluster has no room for them, or they do not start: `serve status`, and the replicas' logs.",
    ),
    Alert(
        "WarmpathReplicasLost",
        "sum(increase(warmpath_request_retries_total[15m])) > 10",
        "0m",
        "ticket",
        "More than 10 generations were sent again because their replica was lost.",
        "Answers go on elsewhere; see why replicas end: memory, preempted nodes, health checks.",
    ),
    Alert(
        "WarmpathRoutingFaults",
        "sum(increase(warmpath_router_faults_total[15m])) + sum(increase(warmpath_feed_malformed_total[15m])) > 0",
        "0m",
        "ticket",
        "Routing failed, or a message of a replica was not believed.",
        "Requests went to the least loaded replica. The ingress' log has the fault; please report it.",
    ),
    Alert(
        "WarmpathDirectoryFull",
        "sum(increase(warmpath_directory_refused_blocks_total[15m])) > 0",
        "15m",
        "ticket",
        "A router's directory has no room for what replicas hold: it misses hits.",
        "Raise directory_max_blocks.",
    ),
    Alert(
        "WarmpathDirectoryDrifts",
        "sum by (kind) (increase(warmpath_directory_drift_total[1h])) > 10",
        "0m",
        "ticket",
        "What routers know of caches was wrong more than 10 times in an hour ({{ $labels.kind }}).",
        "It is mended by itself and costs hits. The ingress' log names the replicas; please report it.",
    ),
    Alert(
        "WarmpathSettingsRefused",
        "sum(increase(warmpath_refused_configurations_total[1h])) > 0",
        "0m",
        "ticket",
        "Live settings were refused and changed nothing.",
        "The log and /v1/cache/state say why.",
    ),
)


def rules() -> dict[str, Any]:
    """Return Prometheus' file of rules."""
    return {
        "groups": [
            {
                "name": "warmpath",
                "rules": [
                    {
                        "alert": alert.name,
                        "expr": alert.promql,
                        "for": alert.for_time,
                        "labels": {"severity": alert.severity},
                        "annotations": {"summary": alert.summary, "description": alert.what_to_do},
                    }
                    for alert in ALERTS
                ],
            }
        ]
    }
