"""A request's spans over ingress, router and replica form one trace, each part in its parent, and are sent."""

import asyncio
import logging
import socket
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from opentelemetry.trace import SpanKind
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import BackPressureError

from router.protocol.request import Decision
from serve_app.engine.protocol import EngineOutput, EngineRequest, FirstToken
from serve_app.engine.token_channel import TokenStream
from serve_app.errors import GenerationFailed
from serve_app.tracing import CallTrace, ReplicaTrace, RequestTrace, _session, end_pull, open_tracer, traceparent_of
from tests.serve_app.generation.fake_replicas import FakeHandle, answer, generation, ids, lost_once, whole
from tests.serve_app.ingress.scripted import scripted
from tests.serve_app.tracing.spans import Recorded, Seen, by_name, collecting


def of_request(recorded: Recorded, handle: FakeHandle) -> list[EngineOutput]:
    """Send one generation, as an ingress does for a traced request."""
    trace = RequestTrace(recorded.tracer, "POST", "/v1/completions", {}, "mine")
    assert trace.traceparent

    async def collect() -> list[EngineOutput]:
        trace.stage("prepare")
        asked = structs.replace(generation(), traceparent=trace.traceparent)
        return [tokens async for tokens in handle.dispatcher.generate(asked)]

    try:
        return asyncio.run(collect())
    finally:
        trace.end("acme", 200, whole=True)


def traced_replica(recorded: Recorded) -> Any:
    """Return a replica's objects for a call: its trace, and a stream that sees outputs."""

    async def chunks(call: EngineRequest, replica: str) -> Any:
        trace = ReplicaTrace(recorded.tracer, call.traceparent, replica, call.prompt_tokens)
        stream = TokenStream(saw=trace.saw)
        pull = trace.pull("b", 8, joined=False)
        trace.submitted()
        end_pull(pull, "whole", 8)
        stream.push(EngineOutput("r", (1,), first=FirstToken(8)))
        stream.push(EngineOutput("r", (2, 3), finish_reason="length"))
        trace.end()
        async for chunk in answer(call, replica):
            yield chunk

    return chunks


def inside(child: Seen, parent: Seen) -> bool:
    return (
        child.trace_id == parent.trace_id
        and child.parent_id == parent.span_id
        and parent.start_ns <= child.start_ns <= child.end_ns <= parent.end_ns
    )


def test_one_request_is_one_trace() -> None:
    """It covers everything from the ingress to the replica's decode; successive parts do not overlap."""
    recorded = Recorded()
    handle = FakeHandle(traced_replica(recorded), tracer=recorded.tracer)
    assert ids(of_request(recorded, handle)) == whole()
    spans = by_name(recorded.spans())
    parents = {
        "prepare": "POST /v1/completions",
        "call": "POST /v1/completions",
        "decision": "call",
        "replica": "call",
        "queue": "replica",
        "pull": "replica",
        "prefill": "replica",
        "decode": "replica",
    }
    root, call, replica = spans["POST /v1/completions"], spans["call"], spans["replica"]
    assert set(spans) == {root.name, *parents} and root.parent_id == ""
    for name, parent in parents.items():
        assert inside(spans[name], spans[parent]), name
    assert spans["prepare"].end_ns <= call.start_ns == spans["decision"].start_ns
    queue, prefill, decode = spans["queue"], spans["prefill"], spans["decode"]
    assert queue.start_ns == replica.start_ns
    assert (queue.end_ns, prefill.end_ns) == (prefill.start_ns, decode.start_ns)
    assert decode.attributes == {"gen_ai.usage.output_tokens": 3}
    assert prefill.attributes == {"warmpath.cached_tokens": 8, "warmpath.computed_tokens": 2}
    assert replica.attributes["warmpath.finish_reason"] == call.attributes["warmpath.outcome"] == "length"
    [sent] = handle.calls
    assert sent.traceparent.split("-")[1:3] == [root.trace_id, call.span_id]
    decided = spans["decision"].attributes
    assert (decided["warmpath.reason"], decided["warmpath.delivered_cached_tokens"]) == ("cold", 8)
    assert decided["warmpath.replica"] == replica.attributes["warmpath.replica"]
    assert {"warmpath.best_cached_tokens", "warmpath.selected_cached_tokens"} <= decided.keys()
    assert spans["pull"].attributes["warmpath.outcome"] == "whole"
    assert root.attributes["warmpath.tenant"] == "acme"


def test_spans_have_the_cached_tokens_that_the_end_tells() -> None:
    """Those of the first token were what a server's events promised."""
    recorded = Recorded()
    root = recorded.tracer.begin("root", {}, SpanKind.SERVER)
    call = CallTrace(recorded.tracer, traceparent_of(root), "r")
    replica = ReplicaTrace(recorded.tracer, call.traceparent, "a", 10)
    outputs = (
        EngineOutput("r", (1,), first=FirstToken(8, expected=True)),
        EngineOutput("r", first=FirstToken(-8, correction=True), finish_reason="length"),
    )
    for output in outputs:
        call.saw(output.first, output.finish_reason)
        replica.saw(output)
    call.end(Decision("a", "me", 1, 8, 8, "cached"))
    replica.end()
    spans = by_name(recorded.spans())
    assert spans["decision"].attributes["warmpath.delivered_cached_tokens"] == 0
    assert spans["prefill"].attributes == {"warmpath.cached_tokens": 0, "warmpath.computed_tokens": 10}


def test_a_lost_call_has_a_span_beside_its_successors() -> None:
    """Each call is under the request, with its outcome; the answer is the same."""
    recorded = Recorded()
    handle = FakeHandle(lost_once(2, error=ActorDiedError()), tracer=recorded.tracer)
    assert ids(of_request(recorded, handle)) == whole()
    calls = [span for span in recorded.spans() if span.name == "call"]
    [root] = [span for span in recorded.spans() if span.parent_id == ""]
    assert [span.attributes["warmpath.outcome"] for span in calls] == ["ActorDiedError", "length"]
    assert [span.parent_id for span in calls] == [root.span_id] * 2
    decisions = [span for span in recorded.spans() if span.name == "decision"]
    assert [span.parent_id for span in decisions] == [span.span_id for span in calls]
    assert decisions[0].attributes["warmpath.replica"] != decisions[1].attributes["warmpath.replica"]


@pytest.mark.parametrize(
    "refusal", [BackPressureError(num_queued_requests=1, max_queued_requests=1), ValueError("not a handle's error")]
)
def test_a_call_that_serve_refuses_at_once_has_a_span_that_ends(refusal: Exception) -> None:
    recorded = Recorded()

    class Refusing(FakeHandle):
        def remote(self, request: EngineRequest) -> Any:
            if not self.calls:
                self.calls.append(request)
                raise refusal
            return super().remote(request)

    handle = Refusing(answer, tracer=recorded.tracer)
    if isinstance(refusal, BackPressureError):
        assert ids(of_request(recorded, handle)) == whole()
    else:
        with pytest.raises(ValueError, match="not a handle"):
            of_request(recorded, handle)
    assert len([span for span in recorded.spans() if span.name == "call"]) == len(handle.calls)


@pytest.mark.parametrize("stream", [False, True])
def test_an_ingress_traces_requests_for_text(demo_model_path: Path, stream: bool) -> None:
    """A client's traceparent is the parent, for any outcome of the request; operators' pages are not traced.

    No attribute contains text from clients' bodies or headers, and each attribute's name is on the page.
    """
    recorded = Recorded()
    parent = f"00-{'a' * 32}-{'b' * 16}-01"
    with scripted(demo_model_path, recorded.tracer) as (url, script):
        script.text = "the answer"
        headers = {"traceparent": parent, "authorization": "Bearer hush", "x-request-id": "mine"}
        body = {"model": "demo", "prompt": "very private", "stream": stream, "cache_salt": "salted", "user": "someone"}
        assert httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60).status_code == 200
        assert (
            httpx.post(f"{url}/v1/completions", json={**body, "n": 0}, headers=headers, timeout=60).status_code == 400
        )
        assert httpx.get(f"{url}/nowhere", headers=headers, timeout=60).status_code == 404
        unsampled = {"traceparent": parent[:-1] + "0"}
        assert httpx.post(f"{url}/v1/completions", json=body, headers=unsampled, timeout=60).status_code == 200
        assert [each.traceparent != "" for each in script.asked] == [True, False]
    answered, refused = [span for span in recorded.spans() if span.name == "POST /v1/completions"]
    stages = {span.name: span for span in recorded.spans() if span.parent_id == answered.span_id}
    assert set(stages) == {"read", "wait", "prepare"}
    assert stages["read"].end_ns == stages["wait"].start_ns <= stages["wait"].end_ns == stages["prepare"].start_ns
    assert len(recorded.spans()) == 5
    for span in (answered, refused):
        assert (span.trace_id, span.parent_id) == ("a" * 32, "b" * 16)
    told = answered.attributes
    assert told["http.response.status_code"] == 200
    assert (told["warmpath.tenant"], told["gen_ai.request.model"]) == ("default", "demo")
    assert told["gen_ai.usage.cache_read.input_tokens"] == 16
    assert told["gen_ai.usage.output_tokens"] > 0
    assert (refused.attributes["http.response.status_code"], refused.attributes["error.type"]) == (400, "400")
    written = str([span.attributes for span in recorded.spans()])
    assert not [word for word in ("private", "hush", "salted", "someone", "the answer") if word in written]


def test_a_stream_that_breaks_off_is_an_error_span(demo_model_path: Path) -> None:
    """Its status was 200, but the span is an error's, with the error's code."""
    recorded = Recorded()
    with scripted(demo_model_path, recorded.tracer) as (url, script):
        script.text, script.fails = "the answer is long enough", GenerationFailed("broken", code="timeout")
        body = {"model": "demo", "prompt": "x", "stream": True}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
    [root] = [span for span in recorded.spans() if span.parent_id == ""]
    assert (root.failed, root.attributes["error.type"]) == (True, "timeout")


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


@pytest.mark.parametrize("status", [200, 307, 500])
def test_spans_go_nowhere_else_and_little_of_a_collectors_answer_is_read(status: int) -> None:
    """It answers without an end, and may redirect to another one."""
    requests, sent = pytest.importorskip("requests"), 0

    class Endless(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            nonlocal sent
            self.send_response(status)
            self.send_header("location", f"{elsewhere.url}/v1/traces")
            self.end_headers()
            with suppress(OSError):
                while sent < 64 << 20:
                    self.wfile.write(b"x" * 65536)
                    sent += 65536

        def log_message(self, *_: Any) -> None:
            pass

    with collecting() as elsewhere, ThreadingHTTPServer(("127.0.0.1", 0), Endless) as server:
        serving = threading.Thread(target=server.serve_forever, daemon=True)
        serving.start()
        with _session() as session:
            session.trust_env = False
            answer = session.post(f"http://127.0.0.1:{server.server_port}/v1/traces", data=b"", timeout=60)
        assert (answer.status_code, answer.content, answer.text) == (status, b"", "")
        assert isinstance(answer, requests.Response)
        server.shutdown()
        serving.join(60)
        assert (elsewhere.paths, sent < 24 << 20) == ([], True)


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
