"""Makes spans and sends them to an OTLP collector in batches, in a thread: no request waits for the collector.

OpenTelemetry's own environment variables set sampling, headers and the queue's size (docs: monitoring). The provider
is not the process's global one, because Ray Serve may have its own spans there.
"""

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
"""The time for one batch, retries included."""

CLOSE_TIMEOUT_S = 2.0
"""The time for unsent spans at a process's end."""

Attributes = Mapping[str, str | int | float | bool]
Headers = Mapping[str, str]

_PROPAGATOR = TraceContextTextMapPropagator()


class Tracer:
    """Makes spans, in any thread."""

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
        """Begin a span, now or at a past ``time.time_ns``. ``parent``: a span, or headers that may name one."""
        if isinstance(parent, Span):
            context = set_span_in_context(parent, Context())
        else:
            context = _PROPAGATOR.extract(parent, Context())
        return self._tracer.start_span(name, context, kind, attributes, start_time=start_ns)

    def record(self, name: str, parent: Span, start_ns: int, end_ns: int, attributes: Attributes | None = None) -> None:
        """Record a span of the past."""
        self.begin(name, parent, start_ns=start_ns, attributes=attributes).end(max(start_ns, end_ns))

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Send unsent spans, for at most ``timeout_s``; blocks."""
        # With a dead collector, each batch uses its whole timeout.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(timeout_s)


def open_tracer(otlp_endpoint: str | None, role: str, instance: str) -> Tracer | None:
    """Return a tracer for a collector's base URL, None without a URL.

    ``role``, ``instance``: the process's role, "ingress" or "replica", and its id.
    """
    if otlp_endpoint is None:
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "warmpath"}
    resource = Resource.create({**named, "service.instance.id": instance, "warmpath.role": role})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(otlp_endpoint.rstrip("/") + "/v1/traces", timeout=EXPORT_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracer(provider)


def traceparent_of(span: Span) -> str:
    """Return a span's W3C ``traceparent`` for children in other processes, "" if it is not sampled."""
    headers: dict[str, str] = {}
    if span.get_span_context().trace_flags.sampled:
        _PROPAGATOR.inject(headers, set_span_in_context(span, Context()))
    return headers.get("traceparent", "")
