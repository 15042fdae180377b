"""Whose child a span is, what is sampled, and what becomes of spans that nobody takes."""

from __future__ import annotations

import logging
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from serve_app.tracing.request import RequestTrace, call_trace
from serve_app.tracing.tracer import open_tracer, traceparent_of
from tests.serve_app.tracing.spans import Recorded, by_name, collecting

hexes = st.integers(1, 2**64 - 1)


@given(hexes, hexes, st.sampled_from((1, 3)))
def test_a_callers_trace_goes_on(trace: int, span: int, flags: int) -> None:
    """A sampled ``traceparent`` is the parent: its trace's id, its span's id, and the same over one more process."""
    recorded = Recorded()
    began = recorded.tracer.begin("a", {"traceparent": f"00-{trace:032x}-{span:016x}-{flags:02x}"})
    below = recorded.tracer.begin("b", {"traceparent": traceparent_of(began)})
    below.end()
    began.end()
    spans = by_name(recorded.spans())
    assert (spans["a"].trace_id, spans["a"].parent_id) == (f"{trace:032x}", f"{span:016x}")
    assert (spans["b"].trace_id, spans["b"].parent_id) == (f"{trace:032x}", spans["a"].span_id)


@given(hexes, hexes, st.sampled_from((0, 2)))
def test_what_a_caller_does_not_sample_is_not_recorded(trace: int, span: int, flags: int) -> None:
    """Neither here nor in any other process, which is told of no parent."""
    recorded = Recorded()
    began = recorded.tracer.begin("a", {"traceparent": f"00-{trace:032x}-{span:016x}-{flags:02x}"})
    assert traceparent_of(began) == ""
    assert call_trace(recorded.tracer, traceparent_of(began), "c") is None
    began.end()
    assert recorded.spans() == []


@given(
    st.text(max_size=80) | st.from_regex(r"[0-9a-f]{2}-[0-9a-f]{30,34}-[0-9a-f]{14,18}-[0-9a-f]{0,4}", fullmatch=True)
)
def test_any_header_gives_a_span(header: str) -> None:
    """What is no traceparent begins a trace of its own; nothing that a client sends is an error."""
    recorded = Recorded()
    recorded.tracer.begin("a", {"traceparent": header, "tracestate": header}).end()
    for span in recorded.spans():
        assert span.parent_id == "" or span.parent_id in header


def test_the_sampler_is_opentelemetrys_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """OTEL_TRACES_SAMPLER holds; where nothing is sampled, nothing is recorded for a request."""
    assert RequestTrace(Recorded(ALWAYS_OFF).tracer, "POST", "/", {}, "").traceparent == ""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    assert RequestTrace(Recorded().tracer, "POST", "/", {}, "").traceparent == ""


def test_without_an_endpoint_there_is_no_tracer() -> None:
    """And whoever asks for a call's trace gets none."""
    assert open_tracer(None, "ingress", "a") is None
    assert call_trace(None, "00-1-1-01", "c") is None


def test_a_collector_gets_what_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """As OTLP over HTTP, at the path of traces below its base URL; closing sends the rest."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with collecting() as collector:
        tracer = open_tracer(f"{collector.url}/", "ingress", "a")
        assert tracer is not None
        root = tracer.begin("root", {})
        tracer.record("child", root, 1, 5, {"warmpath.reason": "cached"})
        root.end()
        tracer.close(60)
        spans = by_name(collector.spans())
        assert set(collector.paths) == {"/v1/traces"}
        assert set(collector.roles.values()) == {"ingress"}
    assert spans["child"].parent_id == spans["root"].span_id
    assert (spans["child"].start_ns, spans["child"].end_ns) == (1, 5)
    assert spans["child"].attributes == {"warmpath.reason": "cached"}


def test_a_collector_that_answers_nothing_costs_spans_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """More spans than the queue holds are made beside it, the queue stays bounded, and closing does not wait for it."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(logging, "raiseExceptions", False)
    for name in ("opentelemetry.sdk._shared_internal", "opentelemetry.exporter"):
        monkeypatch.setattr(logging.getLogger(name), "disabled", True)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tracer = open_tracer(f"http://127.0.0.1:{silent.getsockname()[1]}", "ingress", "a")
        assert tracer is not None
        for _ in range(5000):
            tracer.begin("span", {}).end()
        [processor] = tracer._provider._active_span_processor._span_processors
        assert len(processor._batch_processor._queue) <= 2048  # type: ignore[attr-defined]
        tracer.close(0.01)
    # Its thread would go on beside other tests.
    processor.span_exporter.shutdown()  # type: ignore[attr-defined]
    processor._batch_processor._worker_thread.join(60)  # type: ignore[attr-defined]
    assert not processor._batch_processor._worker_thread.is_alive()  # type: ignore[attr-defined]
