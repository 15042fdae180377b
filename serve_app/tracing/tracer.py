"""Spans and their way to an OTLP collector: in batches, from a bounded queue, by a thread of its own.

Knows no request. Nobody waits for a collector: one that is slow or gone loses spans, and nothing else. Sampling, the
collector's headers and the queue's size are OpenTelemetry's own environment variables (docs/tracing.md). The provider
is not the process's global one: Ray Serve may have spans of its own there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

EXPORT_TIMEOUT_S = 5.0
"""Of one batch, the time in which it is tried again included."""

CLOSE_TIMEOUT_S = 2.0
"""A process that ends waits so long for what it has not sent yet."""

Attributes = Mapping[str, str | int | float | bool]
Headers = Mapping[str, str]

_PROPAGATOR = TraceContextTextMapPropagator()


class Tracer:
    """Makes spans. Any thread may use it; one of a process is enough."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("warmpath")

    def begin(
        self,
        name: str,
        parent: Span | Headers,
        kind: SpanKind = SpanKind.INTERNAL,
        start_ns: int | None = None,
        attributes: Attributes | None = None,
    ) -> Span:
        """Begin a span, now or at a moment that is over (``time.time_ns``); it records nothing unless it is sampled.

        ``parent``: a span of this process, or headers that may name one of another.
        """
        if isinstance(parent, Span):
            context = set_span_in_context(parent, Context())
        else:
            context = _PROPAGATOR.extract(parent, Context())
        return self._tracer.start_span(name, context, kind, attributes, start_time=start_ns)

    def record(self, name: str, parent: Span, start_ns: int, end_ns: int, attributes: Attributes | None = None) -> None:
        """Record a span of what is over."""
        self.begin(name, parent, start_ns=start_ns, attributes=attributes).end(max(start_ns, end_ns))

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Send what is left, for so long; blocks."""
        # Not joined without bound: for a dead collector each batch takes its whole time.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(timeout_s)


def open_tracer(otlp_endpoint: str | None, role: str, instance: str) -> Tracer | None:
    """Return what sends spans to a collector's base URL (``/v1/traces`` is appended), None where there is none.

    ``role``, ``instance``: which process the spans are of, "ingress" or "replica" and its id.
    """
    if otlp_endpoint is None:
        return None
    # Only here: most processes send nothing.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "warmpath"}
    resource = Resource.create({**named, "service.instance.id": instance, "warmpath.role": role})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(otlp_endpoint.rstrip("/") + "/v1/traces", timeout=EXPORT_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracer(provider)


def traceparent_of(span: Span) -> str:
    """Return a span as W3C's ``traceparent`` has it, for its children in other processes; "" if it is not sampled."""
    headers: dict[str, str] = {}
    if span.get_span_context().trace_flags.sampled:
        _PROPAGATOR.inject(headers, set_span_in_context(span, Context()))
    return headers.get("traceparent", "")
