"""One call's spans in its replica: queue, prefill, decode, and the pulls that it waits for.

The engine knows nothing of it: its outputs say enough, and are read where they reach the replica's loop.
"""

from __future__ import annotations

import time

from opentelemetry.trace import Span, SpanKind

from serve_app.engine.protocol import EngineOutput
from serve_app.tracing.tracer import Tracer


class ReplicaTrace:
    """One call in a replica, from its arrival to its last output. Belongs to the replica's loop."""

    def __init__(self, tracer: Tracer, traceparent: str, replica_id: str, prompt_tokens: int) -> None:
        attributes: dict[str, str | int] = {"warmpath.replica": replica_id, "warmpath.prompt_tokens": prompt_tokens}
        self._tracer = tracer
        self._came_ns = time.time_ns()
        parent = {"traceparent": traceparent}
        self._span = tracer.begin("replica", parent, SpanKind.SERVER, self._came_ns, attributes)
        self._prompt_tokens = prompt_tokens
        self._cached_tokens = self._output_tokens = 0
        self._submitted_ns, self._queue_s = self._came_ns, 0.0
        self._first_ns = self._last_ns = 0
        self._finish_reason = ""

    def pull(self, holder: str, tokens: int, *, joined: bool) -> PullTrace:
        """A pull begins that this call waits for. ``joined``: another call's."""
        attributes: dict[str, str | int | bool] = {
            "warmpath.holder": holder,
            "warmpath.wanted_tokens": tokens,
            "warmpath.joined": joined,
        }
        return PullTrace(self._tracer.begin("pull", self._span, attributes=attributes))

    def submitted(self) -> None:
        """The engine has it; what came before may be the load of an adapter."""
        self._submitted_ns = time.time_ns()

    def saw(self, output: EngineOutput) -> None:
        """Take what an output says of the time before it."""
        self._last_ns = time.time_ns()
        self._output_tokens += len(output.token_ids)
        if output.cached_tokens is not None:
            self._first_ns, self._queue_s = self._last_ns, output.queue_s
            self._cached_tokens = output.cached_tokens
        if output.finish_reason is not None:
            self._finish_reason = output.finish_reason

    def end(self) -> None:
        """The call is over; what of it has not happened has no span."""
        # Its caller may have had the last output, and ended its own span, before this is called.
        ended_ns = self._last_ns if self._finish_reason else time.time_ns()
        self._span.set_attribute("warmpath.finish_reason", self._finish_reason or "cancelled")
        record, span = self._tracer.record, self._span
        if self._first_ns:
            began_ns = min(self._submitted_ns + int(self._queue_s * 1e9), self._first_ns)
            computed = {
                "warmpath.cached_tokens": self._cached_tokens,
                "warmpath.computed_tokens": self._prompt_tokens - self._cached_tokens,
            }
            record("queue", span, self._came_ns, began_ns)
            record("prefill", span, began_ns, self._first_ns, computed)
            decoded = {"gen_ai.usage.output_tokens": self._output_tokens}
            record("decode", span, self._first_ns, self._last_ns, decoded)
        else:
            record("queue", span, self._came_ns, ended_ns)
        span.end(ended_ns)


class PullTrace:
    """One pull that a call waits for."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def end(self, outcome: str, tokens: int) -> None:
        """It is over, and brought so many tokens."""
        self._span.set_attributes({"warmpath.outcome": outcome, "warmpath.pulled_tokens": tokens})
        self._span.end()


def replica_trace(tracer: Tracer | None, traceparent: str, replica_id: str, prompt_tokens: int) -> ReplicaTrace | None:
    """Return a call's trace, None where its request has none."""
    if tracer is None or not traceparent:
        return None
    return ReplicaTrace(tracer, traceparent, replica_id, prompt_tokens)
