"""Prometheus metrics of one ingress, and the whole app's through the feed.

Replicas' samples arrive as data (``StatsReport``), routing counters from the ``RoutingCore``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric

from router.protocol.samples import Labels, Sample
from serve_app.ingress.observe.families.catalog import FAMILIES
from serve_app.ingress.observe.families.family import Family

TTFT_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5)

_TELLING = ("tenant", "prompt")
"""Labels that say who is served; a prompt may be one tenant's own."""

_HISTOGRAM_ENDS = ("_bucket", "_sum", "_count")


class IngressMetrics:
    """What an ingress counts itself. ``tenant`` takes only configured names, so its values are bounded."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("warmpath_requests_total")
        self.in_flight = self._gauge("warmpath_requests_in_flight")
        self.waiting = self._gauge("warmpath_requests_waiting")
        self.ttft_s = self._histogram("warmpath_time_to_first_token_seconds", TTFT_BUCKETS_S)
        self.inter_token_s = self._histogram("warmpath_inter_token_latency_seconds", ITL_BUCKETS_S)
        self.prompt_tokens = self._counter("warmpath_tenant_prompt_tokens_total")
        self.cached_tokens = self._counter("warmpath_tenant_cached_prompt_tokens_total")
        self.written_tokens = self._counter("warmpath_tenant_written_prompt_tokens_total")
        self.misses = self._counter("warmpath_cache_misses_total")
        self.missed_tokens = self._counter("warmpath_cache_missed_tokens_total")
        self.completion_tokens = self._counter("warmpath_tenant_completion_tokens_total")
        self.retries = self._counter("warmpath_request_retries_total")
        self.disconnects = self._counter("warmpath_client_disconnects_total")
        self.refused_configurations = self._counter("warmpath_refused_configurations_total")
        self.event_streams = self._gauge("warmpath_event_streams")
        self.dropped_events = self._counter("warmpath_dropped_events_total")
        self.tokenizer_cache_bytes = self._gauge("warmpath_tokenizer_cache_bytes")
        self.tokenizer_cache_max_bytes = self._gauge("warmpath_tokenizer_cache_max_bytes")

    def retried(self, after_first_token: bool) -> None:
        """Count a generation that was sent again."""
        self.retries.labels(str(after_first_token).lower()).inc()

    def missed(self, tenant: str, reason: str, lost_tokens: int) -> None:
        """Count a prompt that was not read from the cache."""
        self.misses.labels(tenant, reason).inc()
        self.missed_tokens.labels(tenant, reason).inc(lost_tokens)

    def samples(self) -> list[Sample]:
        """Return everything as flat samples, to be merged with other ingresses' and replicas'."""
        return [
            (sample.name, tuple(sorted(sample.labels.items())), float(sample.value))
            for metric in self.registry.collect()
            for sample in metric.samples
            if not sample.name.endswith("_created")
        ]

    def _counter(self, name: str) -> Counter:
        return Counter(name, FAMILIES[name].help, _own_labels(name), registry=self.registry)

    def _gauge(self, name: str) -> Gauge:
        return Gauge(name, FAMILIES[name].help, _own_labels(name), registry=self.registry)

    def _histogram(self, name: str, bounds_s: tuple[float, ...]) -> Histogram:
        return Histogram(name, FAMILIES[name].help, _own_labels(name), registry=self.registry, buckets=bounds_s)


def _own_labels(name: str) -> list[str]:
    """Return a family's labels without those that say who counted."""
    return [label for label in FAMILIES[name].labels if label not in ("ingress", "replica")]


class _Samples:
    """A prometheus collector over ready samples, grouped into their families."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._samples = samples

    def collect(self) -> Iterator[Metric]:
        members: dict[str, list[Sample]] = defaultdict(list)
        for sample in self._samples:
            family = _family_of(sample)
            if family is not None:
                members[family.name].append(sample)
        for name in sorted(members):
            family = FAMILIES[name]
            metric = Metric(name.removesuffix("_total"), family.help, family.kind)
            for sample_name, labels, value in members[name]:
                metric.add_sample(sample_name, dict(labels), value)
            yield metric


def _family_of(sample: Sample) -> Family | None:
    """Return the family that a sample belongs to, None for what no page describes."""
    name, labels, _ = sample
    family = FAMILIES.get(name)
    if family is None or family.histogram:
        family = next((FAMILIES.get(name.removesuffix(end)) for end in _HISTOGRAM_ENDS if name.endswith(end)), None)
        if family is None or not family.histogram:
            return None
    known = (*family.labels, "le") if family.histogram else family.labels
    return family if all(label in known for label, _ in labels) else None


def render(samples: Iterable[Sample]) -> bytes:
    """Return samples in Prometheus' text format; those of no known family, or with other labels, are left out."""
    registry = CollectorRegistry()
    registry.register(_Samples(samples))  # duck-typed: anything with collect()
    return generate_latest(registry)


def without_tenants(samples: Iterable[Sample]) -> list[Sample]:
    """Return the samples summed over tenants: for those who may not know whom else this deployment serves."""
    sums: dict[tuple[str, Labels], float] = defaultdict(float)
    for name, labels, number in samples:
        sums[name, tuple(label for label in labels if label[0] not in _TELLING)] += number
    return [(name, labels, number) for (name, labels), number in sums.items()]


def with_label(samples: Iterable[Sample], label: str, value: str) -> list[Sample]:
    """Return the samples with one more label."""
    return [(name, (*labels, (label, value)), number) for name, labels, number in samples]
