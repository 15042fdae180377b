"""What traces cost a request in CPU time: all that an ingress and a replica do for one, without HTTP and a model.

Off: each place asks whether there is a trace; without: it does not ask. On: 10 spans with their attributes go into the
queue of a collector that answers nothing. Encode: what OpenTelemetry's thread does with them where one answers.
`python -m benchmarks tracing --json FILE`
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from statistics import median

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from benchmarks.common.report import parser_of, write
from router.protocol.request import Decision
from serve_app.api.format import Usage
from serve_app.engine.protocol import EngineOutput
from serve_app.replica.token_streams import TokenStream
from serve_app.tracing.replica import replica_trace
from serve_app.tracing.request import RequestTrace, call_trace
from serve_app.tracing.tracer import Tracer, open_tracer

DECISION = Decision("replica", "router", 1, 6000, 5900, "cached", 0.01, 0.02)


def main() -> None:
    """Parse flags, run, write the JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--requests", type=int, default=2000, help="of each run")
    parser.add_argument("--tokens", type=int, default=64, help="outputs of each request")
    flags = parser.parse_args()
    for name in ("opentelemetry.sdk._shared_internal", "opentelemetry.exporter.otlp.proto.http.trace_exporter"):
        logging.getLogger(name).disabled = True
    os.environ["NO_PROXY"] = "127.0.0.1"
    outputs = [EngineOutput("r", (1,), cached_tokens=5900 if not at else None) for at in range(flags.tokens)]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tracer = open_tracer(f"http://127.0.0.1:{silent.getsockname()[1]}", "ingress", "benchmark")
        assert tracer is not None
        tracers: dict[str, Tracer | None] = {"off": None, "on": tracer, "not_sampled": tracer}
        found: dict[str, list[float]] = {name: [] for name in ("without", *tracers)}
        for _ in range(flags.runs):
            found["without"].append(_timed(lambda: _untraced(outputs), flags.requests))
            for name, one in tracers.items():
                parent = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-{0 if name == 'not_sampled' else 1:02x}"}
                found[name].append(_timed(lambda: _request(one, parent, outputs), flags.requests))  # noqa: B023
        tracer.close(0.01)
    found["encode"] = [_encoding_s(outputs) for _ in range(flags.runs)]
    results = {f"{name}_us": round(median(times) * 1e6, 2) for name, times in found.items()}
    off_us = results["off_us"] - results["without_us"]
    on_us = results["on_us"] - results["without_us"]
    write(
        flags.json,
        vars(flags),
        results,
        f"CPU time a request: off {off_us:.1f} us, on {on_us + results['encode_us']:.1f} us",
    )


def _request(tracer: Tracer | None, headers: dict[str, str], outputs: list[EngineOutput]) -> None:
    """All that is done for one request's trace, in the order in which it is."""
    root: RequestTrace | None = None
    if tracer is not None:
        root = RequestTrace(tracer, "POST", "/v1/chat/completions", headers, "mine")
        root = root if root.traceparent else None
    for stage in ("read", "wait", "prepare"):
        if root is not None:
            root.stage(stage)
    call = call_trace(tracer, "" if root is None else root.traceparent, "r.0")
    replica = replica_trace(tracer, "" if call is None else call.traceparent, "replica", 6000)
    if replica is not None:
        replica.submitted()
    stream = TokenStream(trace=replica)
    for output in outputs:
        stream.push(output)
        if call is not None:
            call.saw(output.cached_tokens, output.finish_reason)
    if replica is not None:
        replica.end()
    if call is not None:
        call.end(DECISION)
    if root is not None:
        root.used("demo", Usage(6000, 64, 5900))
        root.end("acme", 200, whole=True)


class _Untraced(TokenStream):
    """A stream as it was before there were traces."""

    def push(self, output: EngineOutput) -> None:
        """Add one output."""
        self._outputs.append(output)
        if output.finish_reason is not None or time.monotonic() >= self._due_s:
            self._ready.set()


def _untraced(outputs: list[EngineOutput]) -> None:
    stream = _Untraced()
    for output in outputs:
        stream.push(output)


def _encoding_s(outputs: list[EngineOutput], requests: int = 50) -> float:
    """Return the CPU time of encoding one request's spans."""
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    for _ in range(requests):
        _request(Tracer(provider), {}, outputs)
    spans = exporter.get_finished_spans()
    return _timed(lambda: encode_spans(spans).SerializePartialToString(), 1) / requests


def _timed(work: Callable[[], None], count: int) -> float:
    began_s = time.process_time()
    for _ in range(count):
        work()
    return (time.process_time() - began_s) / count


if __name__ == "__main__":
    main()
