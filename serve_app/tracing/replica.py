"""A call's spans in its replica, derived from the engine's outputs: queue, prefill, decode, and pulls."""

import time

from opentelemetry.trace import Span, SpanKind

from serve_app.engine.protocol import EngineOutput, FirstToken
from serve_app.tracing.tracer import Attributes, Tracer


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
            self._first = self._last_ns, output.first
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
