"""Spans for tests: recorded in this process, or sent to a collector on loopback."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from serve_app.tracing import Tracer


@dataclass(frozen=True, slots=True)
class Seen:
    """One span that has ended. ``parent_id``: "" for a root; ``failed``: its status is an error."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    failed: bool = False


class Recorded:
    """A tracer that keeps its spans in this process."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = Tracer(provider)

    def spans(self) -> list[Seen]:
        """Return the ended spans, in order."""
        return [
            Seen(
                span.name,
                f"{span.context.trace_id:032x}",
                f"{span.context.span_id:016x}",
                "" if span.parent is None else f"{span.parent.span_id:016x}",
                span.start_time or 0,
                span.end_time or 0,
                dict(span.attributes or {}),
                not span.status.is_ok,
            )
            for span in self._exporter.get_finished_spans()
            if span.context is not None
        ]


class Collector(ThreadingHTTPServer):
    """An OTLP collector on loopback; ``paths``: those of its requests. ``roles``: of the processes, by span id."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.paths: list[str] = []
        self.roles: dict[str, str] = {}
        self._spans: list[Seen] = []
        self._lock = threading.Lock()

    def take(self, path: str, body: bytes) -> None:
        export = ExportTraceServiceRequest.FromString(body)
        with self._lock:
            self.paths.append(path)
            for resource in export.resource_spans:
                of = {each.key: each.value.string_value for each in resource.resource.attributes}
                for span in (span for scope in resource.scope_spans for span in scope.spans):
                    attributes = {
                        each.key: getattr(each.value, str(each.value.WhichOneof("value"))) for each in span.attributes
                    }
                    ids = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
                    seen = Seen(span.name, *ids, span.start_time_unix_nano, span.end_time_unix_nano, attributes)
                    self._spans.append(seen)
                    self.roles[seen.span_id] = of["warmpath.role"]

    def spans(self) -> list[Seen]:
        with self._lock:
            return list(self._spans)


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        self.server.take(self.path, self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def collecting() -> Iterator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever, daemon=True)
        thread.start()
        try:
            yield collector
        finally:
            collector.shutdown()
            thread.join(60)


def by_name(spans: list[Seen]) -> dict[str, Seen]:
    """Return the spans by their names, which are unique."""
    found = {span.name: span for span in spans}
    assert len(found) == len(spans), [span.name for span in spans]
    return found
