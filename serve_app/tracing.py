"""Makes spans and sends them to an OTLP collector in batches, in a thread: no request waits for the collector.

OpenTelemetry's own environment variables set sampling, headers and the queue's size (docs: monitoring). The provider is
not the process's global one, because Ray Serve may have its own spans there.

``RequestTrace`` has a request's stages in its ingress, ``CallTrace`` its calls to replicas with the routing decisions,
``ReplicaTrace`` what the replica's engine did. Attributes hold counts, names and reasons, but no text of prompts or
answers, no key and no salt.
"""

import os
import sys
import threading
import time
from collections.abc import Mapping
from io import BytesIO
from typing import Any

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from router.protocol.request import Decision
from serve_app.api.format import Usage
from serve_app.engine.protocol import EngineOutput, FirstToken

EXPORT_TIMEOUT_S = 5.0
"""The time for one batch, retries included."""

MAX_ANSWER_BYTES = 64 << 10
"""Of a collector's answer; of a larger one the status is enough."""

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
    exporter = OTLPSpanExporter(otlp_endpoint.rstrip("/") + "/v1/traces", timeout=EXPORT_TIMEOUT_S, session=_session())
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracer(provider)


def _session() -> Any:
    """Return a collector's ``requests.Session``: spans go nowhere else, and little is read of what it answers."""
    import requests

    class CollectorSession(requests.Session):
        def get_redirect_target(self, resp: Any) -> None:
            """Find none, whatever an answer says."""

        def send(self, request: Any, **kwargs: Any) -> Any:
            answer = super().send(request, **{**kwargs, "stream": True})
            size = answer.headers.get("Content-Length", "")
            if size.isdecimal() and int(size) <= MAX_ANSWER_BYTES and "Content-Encoding" not in answer.headers:
                answer.content  # noqa: B018  # read whole, so that the connection is used again
                return answer
            answer.close()
            unread = requests.Response()
            unread.status_code, unread.reason, unread.headers = answer.status_code, answer.reason, answer.headers
            unread.url, unread.raw = answer.url, BytesIO()
            return unread

    return CollectorSession()


def traceparent_of(span: Span) -> str:
    """Return a span's W3C ``traceparent`` for children in other processes, "" if it is not sampled."""
    headers: dict[str, str] = {}
    if span.get_span_context().trace_flags.sampled:
        _PROPAGATOR.inject(headers, set_span_in_context(span, Context()))
    return headers.get("traceparent", "")


class RequestTrace:
    """A request from its arrival to its answer's last byte; ``traceparent`` is "" if it is not sampled."""

    def __init__(self, tracer: Tracer, method: str, route: str, headers: Headers, request_id: str) -> None:
        attributes = {"http.request.method": method, "http.route": route, "warmpath.request_id": request_id}
        self._tracer = tracer
        self._at_ns = time.time_ns()
        self._span = tracer.begin(f"{method} {route}", headers, SpanKind.SERVER, self._at_ns, attributes)
        self.traceparent = traceparent_of(self._span)

    def stage(self, name: str) -> None:
        """End a stage, which began with the request or at the end of the previous stage."""
        began_ns, self._at_ns = self._at_ns, time.time_ns()
        self._tracer.record(name, self._span, began_ns, self._at_ns)

    def used(self, model: str, usage: Usage) -> None:
        """Record the model and the usage."""
        if self._span.is_recording():
            self._span.set_attributes(
                {
                    "gen_ai.request.model": model,
                    "gen_ai.usage.input_tokens": usage.prompt_tokens,
                    "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
                    "gen_ai.usage.output_tokens": usage.completion_tokens,
                }
            )

    def failed(self, code: str) -> None:
        """Record the error that broke off the answer."""
        if self._span.is_recording():
            self._span.set_attribute("error.type", code)
            self._span.set_status(Status(StatusCode.ERROR))

    def end(self, tenant: str | None, status: int | None, *, whole: bool) -> None:
        """End the request. ``tenant``: None if no key was valid."""
        self._span.set_attribute("warmpath.tenant", tenant or "none")
        if status is not None:
            self._span.set_attribute("http.response.status_code", status)
            if status >= 500:
                self.failed(str(status))
            elif status >= 400:
                self._span.set_attribute("error.type", str(status))
        if not whole:
            self.failed("unfinished")
        self._span.end()


class CallTrace:
    """A call to a replica; each choice has one or more. ``call_id``: the id in logs; its last part counts calls."""

    def __init__(self, tracer: Tracer, traceparent: str, call_id: str) -> None:
        self._tracer = tracer
        self._began_ns = time.time_ns()
        headers, attributes = {"traceparent": traceparent}, {"warmpath.call_id": call_id}
        self._span = tracer.begin("call", headers, SpanKind.CLIENT, self._began_ns, attributes)
        self._first: FirstToken | None = None
        self._outcome = ""
        self.traceparent = traceparent_of(self._span)

    def saw(self, first: FirstToken | None, outcome: str | None) -> None:
        """Record ``first``, which arrives with the first tokens, or ``outcome``, which arrives with the last."""
        if first is not None:
            if not first.correction:
                self._span.add_event("first_token")
            self._first = first.after(self._first)
        self._outcome = outcome or self._outcome

    def end(self, decision: Decision | None) -> None:
        """End the call with its outcome or the handled exception. ``decision``: None if no replica could accept it."""
        now_ns, raised = time.time_ns(), sys.exc_info()[1]
        if raised is not None and not isinstance(raised, GeneratorExit):
            self._outcome = self._outcome or type(raised.__cause__ or raised).__name__
        self._span.set_attribute("warmpath.outcome", self._outcome or "closed")
        if decision is not None:
            # The router uses this process's monotonic clock.
            decided_ns = now_ns - int((time.monotonic() - decision.decided_s) * 1e9)
            pull: Attributes = {
                "warmpath.pull_from": decision.pull_from, "warmpath.pull_tokens": decision.pull_tokens,
            }  # fmt: skip
            delivered: Attributes = {}
            if self._first is not None:
                delivered = {"warmpath.delivered_cached_tokens": self._first.cached_tokens}
            attributes: Attributes = {
                "warmpath.replica": decision.replica_id,
                "warmpath.reason": decision.reason,
                "warmpath.best_cached_tokens": decision.best_cached_tokens,
                "warmpath.selected_cached_tokens": decision.selected_cached_tokens,
                "warmpath.estimated_ttft_s": decision.estimated_ttft_s,
                **delivered,
                **(pull if decision.pull_from else {}),
            }
            self._tracer.record("decision", self._span, self._began_ns, decided_ns, attributes)
        self._span.end(now_ns)


class ReplicaTrace:
    """One call in a replica, from its arrival to its last output, in the replica's loop."""

    def __init__(self, tracer: Tracer, traceparent: str, replica_id: str, prompt_tokens: int) -> None:
        attributes: Attributes = {"warmpath.replica": replica_id, "warmpath.prompt_tokens": prompt_tokens}
        self._tracer = tracer
        self._came_ns = self._submitted_ns = self._last_ns = time.time_ns()
        headers = {"traceparent": traceparent}
        self._span = tracer.begin("replica", headers, SpanKind.SERVER, self._came_ns, attributes)
        self._prompt_tokens = prompt_tokens
        self._output_tokens = 0
        self._first: tuple[int, FirstToken] | None = None
        self._finish_reason = ""

    def pull(self, holder: str, tokens: int, *, joined: bool) -> Span:
        """Begin a pull that this call waits for. ``joined``: another call started it."""
        attributes: Attributes = {
            "warmpath.holder": holder, "warmpath.wanted_tokens": tokens, "warmpath.joined": joined,
        }  # fmt: skip
        return self._tracer.begin("pull", self._span, attributes=attributes)

    def submitted(self) -> None:
        """Note that the engine has the call."""
        self._submitted_ns = time.time_ns()

    def saw(self, output: EngineOutput) -> None:
        """Record an output."""
        self._last_ns = time.time_ns()
        self._output_tokens += len(output.token_ids)
        if output.first is not None:
            at_ns, earlier = self._first or (self._last_ns, None)
            self._first = at_ns, output.first.after(earlier)
        self._finish_reason = output.finish_reason or self._finish_reason

    def end(self) -> None:
        """End the call, with spans for its completed stages."""
        # The caller may have ended its own span at the last output, before this is called.
        ended_ns = self._last_ns if self._finish_reason else time.time_ns()
        self._span.set_attribute("warmpath.finish_reason", self._finish_reason or "cancelled")
        if self._first is None:
            self._tracer.record("queue", self._span, self._came_ns, ended_ns)
        else:
            first_ns, first = self._first
            began_ns = min(self._submitted_ns + int(first.queue_s * 1e9), first_ns)
            self._tracer.record("queue", self._span, self._came_ns, began_ns)
            computed_tokens = self._prompt_tokens - first.cached_tokens
            prefill = {"warmpath.cached_tokens": first.cached_tokens, "warmpath.computed_tokens": computed_tokens}
            self._tracer.record("prefill", self._span, began_ns, first_ns, prefill)
            decode = {"gen_ai.usage.output_tokens": self._output_tokens}
            self._tracer.record("decode", self._span, first_ns, self._last_ns, decode)
        self._span.end(ended_ns)


def end_pull(span: Span, outcome: str, tokens: int) -> None:
    """End the span of a pull of ``tokens`` tokens."""
    span.set_attributes({"warmpath.outcome": outcome, "warmpath.pulled_tokens": tokens})
    span.end()
