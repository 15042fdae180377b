"""Prometheus text from flat samples: families, kinds and labels survive a parse by the reference client."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from router.core import RoutingCore
from router.protocol.request import RoutedRequest
from serve_app.ingress.observe.metrics import IngressMetrics, render, with_label
from serve_app.ingress.observe.router_metrics import router_samples


def test_rendered_samples_parse_back() -> None:
    """Every sample comes back with its labels and value; histograms and counters keep their kinds."""
    metrics = IngressMetrics()
    metrics.requests.labels("chat", "200", "acme").inc(3)
    metrics.ttft_s.labels("acme").observe(0.1)
    metrics.retried(after_first_token=True)
    core = RoutingCore("router")
    core.update_replicas(["a", "b"])
    decision = core.decide(RoutedRequest("r", b"\1" * 32, 40, b"k" * 16))
    assert decision is not None
    core.record_delivered(decision, 16, 0.2)
    samples = with_label([*metrics.samples(), *router_samples(core)], "ingress", "i-1")
    families = {family.name: family for family in text_string_to_metric_families(render(samples).decode())}
    parsed = {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families.values() for s in f.samples}
    assert parsed == {(name, tuple(sorted(labels))): value for name, labels, value in samples}
    assert families["warmpath_requests"].type == "counter"
    assert families["warmpath_time_to_first_token_seconds"].type == "histogram"
    assert families["warmpath_directory_bytes"].type == "gauge"


def test_every_decision_is_counted_three_ways() -> None:
    """Best, selected and delivered cached tokens of a decision stand side by side, by reason."""
    core = RoutingCore("router")
    core.update_replicas(["a"])
    decision = core.decide(RoutedRequest("r", b"", 40, b"k" * 16))
    assert decision is not None
    core.record_delivered(decision, 24, 0.2)
    values = {(name, dict(labels).get("reason")): value for name, labels, value in router_samples(core)}
    reason = decision.reason
    assert values["warmpath_router_best_cached_tokens_total", reason] == 0
    assert values["warmpath_router_selected_cached_tokens_total", reason] == 0
    assert values["warmpath_router_delivered_cached_tokens_total", reason] == 24
    assert values["warmpath_router_prompt_tokens_total", reason] == 40
