"""A request's spans in its ingress: its stages, and its calls to replicas with the routing decisions.

Attributes hold counts, names and reasons, but no text of prompts or answers, no key and no salt.
"""

import sys
import time

from opentelemetry.trace import SpanKind, Status, StatusCode

from router.protocol.request import Decision
from serve_app.api.format import Usage
from serve_app.engine.protocol import FirstToken
from serve_app.tracing.tracer import Attributes, Headers, Tracer, traceparent_of


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
        self._delivered: Attributes = {}
        self._outcome = ""
        self.traceparent = traceparent_of(self._span)

    def saw(self, first: FirstToken | None, outcome: str | None) -> None:
        """Record ``first``, which arrives with the first tokens, or ``outcome``, which arrives with the last."""
        if first is not None:
            self._delivered = {"warmpath.delivered_cached_tokens": first.cached_tokens}
            self._span.add_event("first_token")
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
            attributes: Attributes = {
                "warmpath.replica": decision.replica_id,
                "warmpath.reason": decision.reason,
                "warmpath.best_cached_tokens": decision.best_cached_tokens,
                "warmpath.selected_cached_tokens": decision.selected_cached_tokens,
                "warmpath.estimated_ttft_s": decision.estimated_ttft_s,
                **self._delivered,
                **(pull if decision.pull_from else {}),
            }
            self._tracer.record("decision", self._span, self._began_ns, decided_ns, attributes)
        self._span.end(now_ns)
