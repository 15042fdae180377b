"""Prometheus text from flat samples: families, kinds and labels survive a parse by the reference client."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from router.core import RoutingCore
from router.protocol.request import RoutedRequest
from serve_app.ingress.observe.metrics import IngressMetrics, render, with_label
from serve_app.ingress.observe.router_metrics import router_samples


def test_rendered_samples_parse_back() -> None:
    """Every sample comes back with its labels and value; histograms and counters keep their kinds.

    Best, selected and delivered cached tokens of a decision stand side by side, by reason.
    """
    metrics = IngressMetrics()
    metrics.requests.labels("chat", "200", "acme").inc(3)
    metrics.ttft_s.labels("acme").observe(0.1)
    metrics.retried(after_first_token=True)
    core = RoutingCore("router")
    core.update_replicas(["a", "b"])
    decision = core.decide(RoutedRequest("r", b"\1" * 32, 40, b"k" * 16))
    assert decision is not None
    core.record_delivered(decision, 24, 0.2)
    samples = with_label([*metrics.samples(), *router_samples(core)], "ingress", "i-1")
    families = {family.name: family for family in text_string_to_metric_families(render(samples).decode())}
    parsed = {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families.values() for s in f.samples}
    assert parsed == {(name, tuple(sorted(labels))): value for name, labels, value in samples}
    assert families["warmpath_requests"].type == "counter"
    assert families["warmpath_time_to_first_token_seconds"].type == "histogram"
    assert families["warmpath_directory_bytes"].type == "gauge"
    labels = (("ingress", "i-1"), ("policy", core.settings.policy), ("reason", decision.reason))
    counted = {"best_cached": 0, "selected_cached": 0, "delivered_cached": 24, "prompt": 40}
    for name, tokens in counted.items():
        assert parsed[f"warmpath_router_{name}_tokens_total", labels] == tokens
