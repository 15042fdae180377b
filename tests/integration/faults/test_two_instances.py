"""Beside a first instance: a hot prefix spreads by copying, each request is one trace, and nothing is shared."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from benchmarks.common.prompts import text_of
from serve_app.checkpoints.sources import resolve_model
from tests.integration.conftest import HTTP, cache_state, eventually, wait_until_cached
from tests.integration.faults.conftest import EXPORTER, Second
from tests.serve_app.tracing.spans import Seen

pytestmark = [pytest.mark.integration, pytest.mark.long]

CHAT = "/v1/chat/completions"
PREFIX_TOKENS, REQUESTS = 6000, 12


def test_a_hot_prefix_is_pulled_once_and_traces_are_whole(second: Second) -> None:
    """Requests go to the replicas in turn: the one without the prefix copies it, and then holds it too.

    docs: routing, monitoring
    """
    system = text_of(PREFIX_TOKENS, resolve_model("demo"), 1)

    def ask(number: int) -> int:
        """Return the number of cached tokens of one question's prompt."""
        messages = [{"role": "system", "content": system}, {"role": "user", "content": f"Question {number}"}]
        body = {"model": "demo", "temperature": 0, "max_tokens": 6, "messages": messages}
        parent = {"traceparent": f"00-{number + 1:032x}-{number + 1:016x}-01"}
        got = HTTP.post(second.url + CHAT, json=body, headers=parent)
        assert got.status_code == 200, got.text
        answer = got.json()
        if not number:
            wait_until_cached(second.url, body, PREFIX_TOKENS - 16)
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert ask(0) == 0
    with ThreadPoolExecutor(REQUESTS) as pool:
        assert min(pool.map(ask, range(1, REQUESTS + 1))) >= PREFIX_TOKENS - 16
    if EXPORTER:
        traces_are_whole(second)


def traces_are_whole(second: Second) -> None:
    """Spans of both processes are children of the client's span; one of all requests pulled."""

    def traces() -> list[dict[str, Seen]]:
        trace_ids = [f"{number + 1:032x}" for number in range(1, REQUESTS + 1)]
        spans = second.collector.spans()
        return [{span.name: span for span in spans if span.trace_id == trace_id} for trace_id in trace_ids]

    # A collector gets a process's spans some seconds later, inner spans before the outer ones.
    names = (f"POST {CHAT}", "call", "replica")
    eventually(lambda: all(trace.keys() >= set(names) for trace in traces()))
    for number, trace in enumerate(traces(), 2):
        root, call, replica = (trace[name] for name in names)
        assert root.attributes["gen_ai.usage.cache_read.input_tokens"] >= PREFIX_TOKENS - 16
        parents = [span.parent_id for span in (root, call, replica)]
        assert parents == [f"{number:016x}", root.span_id, call.span_id]
        assert (
            root.start_ns <= call.start_ns <= replica.start_ns <= replica.end_ns <= root.end_ns
        )  # all processes share one machine's clock
        roles = [second.collector.roles[span.span_id] for span in (root, call, replica)]
        assert roles == ["ingress", "ingress", "replica"]
    pulls = [trace["pull"].attributes for trace in traces() if "pull" in trace]
    copied = [pull for pull in pulls if not pull["warmpath.joined"]]
    assert [(pull["warmpath.outcome"], pull["warmpath.pulled_tokens"] > 5000) for pull in copied] == [("whole", True)]


def test_instances_share_nothing_and_a_benchmark_ends_with_its_own(url: str, second: Second) -> None:
    """Ingress ports allow sharing (SO_REUSEPORT), so instances with equal ports would get each other's requests.

    docs: isolation
    """
    routers = {base: {cache_state(base)["router_id"] for _ in range(25)} for base in (url, second.url)}
    assert [len(names) for names in routers.values()] == [1, 1]
    assert routers[url] != routers[second.url]
    second.benchmark.terminate()
    assert second.benchmark.wait(240) == 128 + 15
    with pytest.raises(httpx.ConnectError):
        HTTP.get(f"{second.url}/health")
    assert HTTP.get(f"{url}/health").status_code == 200
