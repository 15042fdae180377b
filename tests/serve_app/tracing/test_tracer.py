"""The parents of spans, sampling, and spans that cannot be delivered."""

import logging
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.tracing.request import RequestTrace
from serve_app.tracing.tracer import open_tracer, traceparent_of
from tests.serve_app.tracing.spans import Recorded, by_name, collecting

hexes = st.integers(1, 2**64 - 1)


@given(hexes, hexes, st.sampled_from((0, 1, 2, 3)))
def test_a_callers_trace_continues_if_it_is_sampled(trace: int, span: int, flags: int) -> None:
    """A sampled ``traceparent`` is the parent, also in a second process; otherwise no process records anything."""
    recorded = Recorded()
    began = recorded.tracer.begin("a", {"traceparent": f"00-{trace:032x}-{span:016x}-{flags:02x}"})
    if flags & 1:
        recorded.tracer.begin("b", {"traceparent": traceparent_of(began)}).end()
    else:
        assert traceparent_of(began) == ""
    began.end()
    spans = by_name(recorded.spans())
    assert set(spans) == ({"a", "b"} if flags & 1 else set())
    if flags & 1:
        assert {seen.trace_id for seen in spans.values()} == {f"{trace:032x}"}
        assert (spans["a"].parent_id, spans["b"].parent_id) == (f"{span:016x}", spans["a"].span_id)


@given(
    st.text(max_size=80) | st.from_regex(r"[0-9a-f]{2}-[0-9a-f]{30,34}-[0-9a-f]{14,18}-[0-9a-f]{0,4}", fullmatch=True)
)
def test_any_header_gives_a_span(header: str) -> None:
    """An invalid traceparent begins a new trace; no header of a client is an error."""
    recorded = Recorded()
    recorded.tracer.begin("a", {"traceparent": header, "tracestate": header}).end()
    assert all(span.parent_id == "" or span.parent_id in header for span in recorded.spans())


def test_without_an_endpoint_or_a_sampler_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """OTEL_TRACES_SAMPLER applies."""
    assert open_tracer(None, "ingress", "a") is None
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    assert RequestTrace(Recorded().tracer, "POST", "/", {}, "").traceparent == ""


def test_a_collector_gets_ended_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are sent as OTLP over HTTP, to the path of traces below its base URL; closing sends the rest."""
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
    """Closing does not wait for it."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(logging, "raiseExceptions", False)
    for name in ("opentelemetry.sdk._shared_internal", "opentelemetry.exporter"):
        monkeypatch.setattr(logging.getLogger(name), "disabled", True)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tracer = open_tracer(f"http://127.0.0.1:{silent.getsockname()[1]}", "ingress", "a")
        assert tracer is not None
        tracer.begin("span", {}).end()
        tracer.close(0.01)
    # Otherwise its thread would run on beside other tests.
    [processor] = tracer._provider._active_span_processor._span_processors
    processor.span_exporter.shutdown()  # type: ignore[attr-defined]
    processor._batch_processor._worker_thread.join(60)  # type: ignore[attr-defined]
    assert not processor._batch_processor._worker_thread.is_alive()  # type: ignore[attr-defined]
