"""Prometheus metrics of one ingress, and the whole app's through the feed.

Replicas' samples arrive as data (``StatsReport``), routing counters from the ``RoutingCore``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric

from router.protocol.samples import Sample

TTFT_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5)


class IngressMetrics:
    """What an ingress counts itself. ``tenant`` takes only configured names, so its values are bounded."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.requests = counter(
            "warmpath_requests", "HTTP requests by endpoint, status and tenant", ["endpoint", "status", "tenant"]
        )
        self.in_flight = gauge("warmpath_requests_in_flight", "HTTP requests being answered")
        self.waiting = gauge(
            "warmpath_requests_waiting", "Requests in an ingress' line for a place at the replicas", ["tenant"]
        )
        self.ttft_s = histogram(
            "warmpath_http_time_to_first_token_seconds",
            "From the request's arrival at the ingress to its first token",
            ["tenant"],
            buckets=TTFT_BUCKETS_S,
        )
        self.inter_token_s = histogram(
            "warmpath_http_inter_token_latency_seconds",
            "Seconds a token, between chunks of one answer",
            ["tenant"],
            buckets=ITL_BUCKETS_S,
        )
        self.prompt_tokens = counter("warmpath_tenant_prompt_tokens", "Prompt tokens", ["tenant"])
        self.cached_tokens = counter(
            "warmpath_tenant_cached_prompt_tokens", "Prompt tokens served from cache", ["tenant"]
        )
        self.completion_tokens = counter("warmpath_tenant_completion_tokens", "Generated tokens", ["tenant"])
        self.retries = counter(
            "warmpath_request_retries", "Generations sent again after a replica was lost", ["after_first_token"]
        )
        self.disconnects = counter("warmpath_client_disconnects", "Clients that left before the answer's end")
        self.refused_configurations = counter(
            "warmpath_refused_configurations", "user_configs that could not be used and changed nothing"
        )
        self.tokenizer_cache_bytes = gauge("warmpath_tokenizer_cache_bytes", "Bytes of cached ids and hashes")
        self.tokenizer_cache_max_bytes = gauge("warmpath_tokenizer_cache_max_bytes", "Their bound")

    def retried(self, after_first_token: bool) -> None:
        """Count a generation that was sent again."""
        self.retries.labels(str(after_first_token).lower()).inc()

    def samples(self) -> list[Sample]:
        """Return everything as flat samples, to be merged with other ingresses' and replicas'."""
        return [
            (sample.name, tuple(sorted(sample.labels.items())), float(sample.value))
            for metric in self.registry.collect()
            for sample in metric.samples
            if not sample.name.endswith("_created")
        ]


class _Samples:
    """A prometheus collector over ready samples, grouped into families by name."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._samples = samples

    def collect(self) -> Iterator[Metric]:
        families: dict[str, list[Sample]] = defaultdict(list)
        ready = list(self._samples)
        histograms = {name.removesuffix("_bucket") for name, _, _ in ready if name.endswith("_bucket")}
        for sample in ready:
            families[_family(sample[0], histograms)].append(sample)
        for family in sorted(families):
            members = families[family]
            if family in histograms:
                kind = "histogram"
            elif members[0][0].endswith("_total"):
                kind = "counter"
            else:
                kind = "gauge"
            metric = Metric(family, family.replace("_", " "), kind)
            for name, labels, value in members:
                metric.add_sample(name, dict(labels), value)
            yield metric


def _family(name: str, histograms: set[str]) -> str:
    for suffix in ("_bucket", "_sum", "_count"):
        base = name.removesuffix(suffix)
        if base != name and base in histograms:
            return base
    return name.removesuffix("_total")


def render(samples: Iterable[Sample]) -> bytes:
    """Return samples in Prometheus' text format; counters end in ``_total``, histograms in ``_bucket`` and so on."""
    registry = CollectorRegistry()
    registry.register(_Samples(samples))  # duck-typed: anything with collect()
    return generate_latest(registry)


def with_label(samples: Iterable[Sample], label: str, value: str) -> list[Sample]:
    """Return the samples with one more label."""
    return [(name, (*labels, (label, value)), number) for name, labels, number in samples]
