"""Prometheus metrics of one ingress and its router, and of the whole app through the feed.

Every decision is counted in three kinds of cached tokens: the best replica's, the selected replica's according to the
directory, and the delivered ones. Their differences are regret: the price of load and of stale hints.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from types import SimpleNamespace
from typing import Any, get_args

from prometheus_client import generate_latest
from prometheus_client.core import Metric

from router import __version__
from router.core import RoutingCore
from router.directory import DriftKind
from router.observe import PolicyCounters, ShadowCounters
from router.protocol.samples import TTFT_BUCKETS_S, Labels, Sample
from router.protocol.samples import Histogram as PlainHistogram
from serve_app.errors import LimitReason
from serve_app.ingress.observe.families import FAMILIES, VLLM_FAMILIES, Family
from serve_app.live.tally import ANSWER_BUCKETS_S, GENERATIONS, Span, Tally

COMPLETION_TOKENS = "warmpath_tenant_completion_tokens_total"
ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5)

_TELLING = ("tenant", "prompt", "node")
"""Labels that reveal tenants or machines; a prompt may belong to one tenant."""

EXPECTED_STATUSES = ("200", "429", "500", "503")
MOST_EXPECTED = 64
"""The number of configured tenants with counters before their first request."""

_WITHOUT_LABELS = (
    "warmpath_requests_in_flight",
    "warmpath_client_disconnects_total",
    "warmpath_refused_configurations_total",
    "warmpath_dropped_events_total",
)
_BY_TENANT = (
    "warmpath_tenant_prompt_tokens_total",
    "warmpath_tenant_cached_prompt_tokens_total",
    "warmpath_tenant_written_prompt_tokens_total",
    COMPLETION_TOKENS,
)
_TIMES: dict[Span, tuple[str, frozenset[str]]] = {
    "ttft": ("warmpath_time_to_first_token_seconds", frozenset(("+Inf", *map(repr, TTFT_BUCKETS_S)))),
    "e2e": ("warmpath_e2e_request_latency_seconds", frozenset(("+Inf", *map(repr, ANSWER_BUCKETS_S)))),
}
"""The histogram of each span, and the bounds of its buckets."""


class IngressMetrics(Tally):
    """An ingress' own counts. The label ``tenant`` holds only configured names, so its values are bounded.

    ``more``: metrics that others count.
    """

    def __init__(self, more: Sequence[Callable[[], Iterable[Sample]]] = ()) -> None:
        super().__init__()
        self._expected: set[tuple[str, str]] = set()
        self._more = more
        self.inter_token_s: defaultdict[str, PlainHistogram] = defaultdict(lambda: PlainHistogram(ITL_BUCKETS_S))
        for name in _WITHOUT_LABELS:
            self.add(name, 0.0)
        for after_first_token in ("false", "true"):
            self.add("warmpath_request_retries_total", 0.0, after_first_token=after_first_token)

    def expect(self, tenants: Iterable[str]) -> None:
        """Show the counters of these tenants, of which a bounded number count, before their first event.

        ``increase()`` does not see the event that creates a counter.
        """
        for tenant in islice(tenants, MOST_EXPECTED):
            for endpoint in sorted(GENERATIONS):
                self._expect(endpoint, tenant)
            for status in ("500", "503"):
                self.add("warmpath_broken_streams_total", 0.0, status=status, tenant=tenant)
            for name in _BY_TENANT:
                self.add(name, 0.0, tenant=tenant)
            _ = [times[tenant] for times in self.times_s.values()], self.inter_token_s[tenant]

    def answered(self, endpoint: str, status: int, tenant: str) -> None:
        """Count an HTTP request; ``tenant`` may be "none"."""
        if endpoint in GENERATIONS:
            self._expect(endpoint, tenant)
        self.add("warmpath_requests_total", endpoint=endpoint, status=str(status), tenant=tenant)

    def _expect(self, endpoint: str, tenant: str) -> None:
        if (endpoint, tenant) not in self._expected:
            self._expected.add((endpoint, tenant))
            for status in EXPECTED_STATUSES:
                self.add("warmpath_requests_total", 0.0, endpoint=endpoint, status=status, tenant=tenant)

    def retried(self, after_first_token: bool) -> None:
        """Count a resent generation."""
        self.add("warmpath_request_retries_total", after_first_token=str(after_first_token).lower())

    def refused(self, tenant: str, reason: LimitReason) -> None:
        """Count a request that a limit refused."""
        self.add("warmpath_refusals_total", tenant=tenant, place=reason.place, limit=reason.limit)

    def missed(self, tenant: str, reason: str, lost_tokens: int) -> None:
        """Count a cache miss."""
        self.add("warmpath_cache_misses_total", tenant=tenant, reason=reason)
        self.add("warmpath_cache_missed_tokens_total", lost_tokens, tenant=tenant, reason=reason)

    def samples(self) -> list[Sample]:
        """Return all metrics as flat samples, to merge with those of other ingresses and replicas."""
        found = [(name, labels, value) for (name, labels), value in self.values.items()]
        found += samples_of({"warmpath_build_info": 1}, ("version", __version__))
        for others in self._more:
            found += others()
        for span, (name, bounds) in _TIMES.items():
            for tenant, times in self.times_s[span].items():
                cells = times.samples(name, (("tenant", tenant),))
                found += [one for one in cells if one[1][-1][0] != "le" or one[1][-1][1] in bounds]
        for tenant, seconds in self.inter_token_s.items():
            found += seconds.samples("warmpath_inter_token_latency_seconds", (("tenant", tenant),))
        return found


def router_samples(core: RoutingCore) -> list[Sample]:
    """Return the counters of this process's router, and the sizes of its tables."""
    counters, state = core.counters, core.state()
    directory = state["directory"]
    samples = samples_of(
        {
            "warmpath_router_all_full_total": counters.all_full,
            "warmpath_router_faults_total": counters.faults,
            "warmpath_router_rejected_total": counters.rejected,
            "warmpath_router_sent_back_total": counters.rerouted,
            "warmpath_feed_gaps_total": counters.feed.gaps,
            "warmpath_feed_snapshots_total": counters.feed.snapshots,
            "warmpath_feed_malformed_total": counters.feed.malformed,
            "warmpath_directory_blocks": directory["blocks"],
            "warmpath_directory_refused_blocks_total": directory["refused_blocks"],
            "warmpath_directory_checks_total": directory["checks"],
            "warmpath_router_replicas": len(state["replicas"]),
        }
    )
    samples += counters.decision_s.samples("warmpath_router_decision_seconds")
    samples += counters.wait_s.samples("warmpath_wait_seconds", (("place", "router"),))
    for policy, counted in list(counters.by_policy.items()):
        samples += _policy_samples(counted, ("policy", policy))
    for (policy, shadow), compared in list(counters.shadows.items()):
        samples += _shadow_samples(compared, ("policy", policy), ("shadow", shadow))
    if core.shadow is not None:
        samples += samples_of({"warmpath_router_shadow_share": core.shadow.share}, ("shadow", core.shadow.policy))
    for replica_id, decisions in list(counters.decisions_by_replica.items()):
        samples += samples_of({"warmpath_router_replica_decisions_total": decisions}, ("replica", replica_id))
    for replica in state["replicas"]:
        found = core.drift.differences.get(replica["replica_id"]) or Counter[DriftKind]()
        for kind in get_args(DriftKind):
            drifts = {"warmpath_directory_drift_total": found[kind]}
            samples += samples_of(drifts, ("replica", replica["replica_id"]), ("kind", kind))
        queued = {"warmpath_router_queued_tokens": replica["queued_prefill_tokens"]}
        samples += samples_of(queued, ("replica", replica["replica_id"]))
    return samples


def _policy_samples(counted: PolicyCounters, policy: tuple[str, str]) -> list[Sample]:
    samples = list(counted.estimates.ratio.samples("warmpath_router_ttft_actual_to_estimated_ratio", (policy,)))
    for name, tokens in list(counted.by_reason.items()):
        reason = ("reason", name)
        counts = {
            "warmpath_router_decisions_total": tokens.decisions,
            "warmpath_router_prompt_tokens_total": tokens.prompt_tokens,
            "warmpath_router_best_cached_tokens_total": tokens.best_cached_tokens,
            "warmpath_router_selected_cached_tokens_total": tokens.selected_cached_tokens,
            "warmpath_router_delivered_cached_tokens_total": tokens.delivered_cached_tokens,
        }
        samples += samples_of(counts, policy, reason)
        for cause in ("not_selected", "evicted", "unused"):
            lost = {"warmpath_router_regret_tokens_total": getattr(tokens, f"{cause}_tokens")}
            samples += samples_of(lost, policy, reason, ("cause", cause))
    return samples


def _shadow_samples(compared: ShadowCounters, *labels: tuple[str, str]) -> list[Sample]:
    counts = {
        "warmpath_router_shadow_decisions_total": compared.decisions,
        "warmpath_router_shadow_different_total": compared.different,
        "warmpath_router_shadow_prompt_tokens_total": compared.prompt_tokens,
        "warmpath_router_shadow_faults_total": compared.faults,
    }
    both = (
        ("acting", compared.acting_predicted_tokens, compared.acting_estimated_ttft_s),
        ("shadow", compared.predicted_tokens, compared.estimated_ttft_s),
    )
    samples = samples_of(counts, *labels)
    for choice, predicted_tokens, ttft_s in both:
        of_choice = {
            "warmpath_router_shadow_predicted_tokens_total": predicted_tokens,
            "warmpath_router_shadow_estimated_ttft_seconds_total": ttft_s,
        }
        samples += samples_of(of_choice, *labels, ("choice", choice))
    return samples


def replica_samples(core: RoutingCore) -> list[Sample]:
    """Return the latest samples of every replica, with the label ``replica``."""
    reports = core.stats().items()
    return [sample for replica_id, report in reports for sample in with_label(report.samples, "replica", replica_id)]


def autoscaling_samples(notices: Sequence[Mapping[str, Any]]) -> list[Sample]:
    """Return samples of the policy's latest decision, none before the first. ``notices``: newest first."""
    if not notices:
        return []
    latest = notices[0]
    replicas = {
        "warmpath_autoscaling_target_replicas": latest["target"],
        "warmpath_autoscaling_needed_replicas": latest["needed"],
    }
    return samples_of(replicas, ("reason", str(latest["reason"])))


def samples_of(values: Mapping[str, float], *labels: tuple[str, str]) -> list[Sample]:
    """Convert numbers by name to samples."""
    return [(name, labels, float(value)) for name, value in values.items()]


_SHOWN = {**FAMILIES, **VLLM_FAMILIES}


def _family_of(sample: Sample) -> Family | None:
    """Return a sample's family, None for an undocumented sample."""
    name, labels, _ = sample
    family = _SHOWN.get(name)
    if family is None or family.kind == "histogram":
        ends = ("_bucket", "_sum", "_count")
        family = next((_SHOWN.get(name.removesuffix(end)) for end in ends if name.endswith(end)), None)
        if family is None or family.kind != "histogram":
            return None
    known = (*family.labels, "model", *(["le"] if family.kind == "histogram" else []))
    return family if all(label in known for label, _ in labels) else None


def render(samples: Iterable[Sample]) -> bytes:
    """Return samples in Prometheus' text format, without those of unknown families or with unknown labels."""
    metrics: dict[str, Metric] = {}
    for sample in samples:
        family = _family_of(sample)
        if family is not None:
            if family.name not in metrics:
                metrics[family.name] = Metric(family.name.removesuffix("_total"), family.help, family.kind)
            name, labels, value = sample
            metrics[family.name].add_sample(name, dict(labels), value)
    ordered = [metrics[name] for name in sorted(metrics)]
    return generate_latest(SimpleNamespace(collect=lambda: ordered))  # it calls only this method


def without_tenants(samples: Iterable[Sample]) -> list[Sample]:
    """Return the samples summed over tenants, for callers that may not learn the names of tenants."""
    sums: dict[tuple[str, Labels], float] = defaultdict(float)
    for name, labels, number in samples:
        sums[name, tuple(label for label in labels if label[0] not in _TELLING)] += number
    return [(name, labels, number) for (name, labels), number in sums.items()]


def with_label(samples: Iterable[Sample], label: str, value: str) -> list[Sample]:
    """Return the samples with one more label."""
    return [(name, (*labels, (label, value)), number) for name, labels, number in samples]
