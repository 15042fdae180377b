"""A hot prefix spreads by copying, and each request is one trace through all processes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.common.prompts import text_of
from serve_app.checkpoints.sources.resolve import resolve_model
from tests.integration.conftest import HTTP, eventually, wait_until_cached
from tests.integration.faults.conftest import EXPORTER, Second
from tests.serve_app.tracing.spans import Seen

pytestmark = pytest.mark.integration

CHAT = "/v1/chat/completions"
PREFIX_TOKENS, REQUESTS = 6000, 12
PARENTS = {
    "read": f"POST {CHAT}", "wait": f"POST {CHAT}", "prepare": f"POST {CHAT}", "call": f"POST {CHAT}",
    "decision": "call", "replica": "call", "queue": "replica", "prefill": "replica", "decode": "replica",
}  # fmt: skip
"""By a span's name, what it is a part of."""


def test_a_hot_prefix_is_pulled_once_and_traces_are_whole(second: Second) -> None:
    """Requests go to the replicas in turn: who lacks the prefix copies it, and then has what the holder has.

    docs/pull.md, docs/tracing.md
    """
    system = text_of(PREFIX_TOKENS, resolve_model("demo"), 1)

    def ask(number: int) -> int:
        """How many tokens of one question's prompt were cached."""
        messages = [{"role": "system", "content": system}, {"role": "user", "content": f"Question {number}"}]
        body = {"model": "demo", "temperature": 0, "max_tokens": 6, "messages": messages}
        parent = {"traceparent": f"00-{number + 1:032x}-{number + 1:016x}-01"}
        answer = HTTP.post(second.url + CHAT, json=body, headers=parent).raise_for_status().json()
        if not number:
            wait_until_cached(second.url, body, PREFIX_TOKENS - 16)
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert ask(0) == 0
    with ThreadPoolExecutor(REQUESTS) as pool:
        assert min(pool.map(ask, range(1, REQUESTS + 1))) >= PREFIX_TOKENS - 16
    if EXPORTER:
        traces_are_whole(second)


def traces_are_whole(second: Second) -> None:
    """Each request's spans lie below its client's and within each other; one of all requests pulled."""

    def traces() -> list[dict[str, Seen]]:
        trace_ids = [f"{number + 1:032x}" for number in range(1, REQUESTS + 1)]
        spans = second.collector.spans()
        return [{span.name: span for span in spans if span.trace_id == trace_id} for trace_id in trace_ids]

    # A collector gets a process's spans some seconds later; these three end after what is in them.
    eventually(lambda: all({"replica", "call", f"POST {CHAT}"} <= trace.keys() for trace in traces()))
    for number, trace in enumerate(traces(), 2):
        root = trace[f"POST {CHAT}"]
        assert root.parent_id == f"{number:016x}"
        assert root.attributes["gen_ai.usage.cache_read.input_tokens"] >= PREFIX_TOKENS - 16
        for name, whole in PARENTS.items():
            part, parent = trace[name], trace[whole]
            assert part.parent_id == parent.span_id, name
            assert parent.start_ns <= part.start_ns <= part.end_ns <= parent.end_ns, name  # one machine's clock
            role = "ingress" if parent is root or name == "decision" else "replica"
            assert second.collector.roles[part.span_id] == role
    pulls = [trace["pull"].attributes for trace in traces() if "pull" in trace]
    copied = [pull for pull in pulls if not pull["warmpath.joined"]]
    assert [(pull["warmpath.outcome"], pull["warmpath.pulled_tokens"] > 5000) for pull in copied] == [("whole", True)]
