"""Pulls between real replicas: a hot prefix spreads by copying, and a killed holder costs time only."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from typing import Any

import httpx
import pytest

from benchmarks.common.prompts import text_of
from serve_app.checkpoints.sources.resolve import resolve_model
from tests.integration.conftest import PATIENCE_S, eventually, replicas_of, wait_for_replicas, wait_until_cached
from tests.integration.demo.conftest import EXPORTER, Second
from tests.serve_app.tracing.spans import Seen

pytestmark = pytest.mark.integration

CHAT = "/v1/chat/completions"
PREFIX_TOKENS = 6000
MOST_QUESTIONS = 60


def text(tokens: int, seed: int) -> str:
    return text_of(tokens, resolve_model("demo"), seed)


def body(system: str, question: str, model: str = "demo", **extra: object) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return {"model": model, "temperature": 0, "max_tokens": 6, "messages": messages, **extra}


async def ask(client: httpx.AsyncClient, request: dict[str, Any], **headers: str) -> dict[str, Any]:
    answer = await client.post(CHAT, json=request, headers=headers)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def counted(url: str, name: str) -> float:
    """The sum of a counter of pulls over all replicas."""
    metrics = httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text
    return sum(map(float, re.findall(rf"^warmpath_kv_pulls_{name}}} (\S+)$", metrics, re.MULTILINE)))


def begun(url: str) -> float:
    return counted(url, "begun_total{.*")


def ended(url: str, outcome: str) -> float:
    """How many pulls of all replicas ended that way."""
    return counted(url, rf'total{{.*outcome="{outcome}".*')


def test_a_hot_prefix_is_pulled_and_answers_are_equal(second: Second) -> None:
    """Requests go to the replicas in turn: who lacks the prefix copies it, once, and then has what the holder has.

    docs/determinism.md
    """
    system, url = text(PREFIX_TOKENS, 1), second.url

    async def run() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
            first = body(system, text(40, 100), "second")
            await ask(client, first)
            await asyncio.to_thread(wait_until_cached, url, first, PREFIX_TOKENS - 16)
            requests = [body(system, text(40, 100 + question), "second") for question in range(1, 13)]
            asked = (ask(client, request, traceparent=parent_of(number)) for number, request in enumerate(requests))
            answers = await asyncio.gather(*asked)
            cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
            assert min(cached) >= PREFIX_TOKENS - 16, cached
            await asyncio.to_thread(eventually, lambda: ended(url, "whole") == 1)
            for number in (-2, -1):
                computed = await ask(client, {**requests[number], "cache_salt": f"alone {number}"})
                assert computed["choices"] == answers[number]["choices"]
            if EXPORTER:
                await asyncio.to_thread(traces_are_whole, second, len(requests))

    asyncio.run(run())


def parent_of(number: int) -> str:
    """The ``traceparent`` of one request's client."""
    return f"00-{number + 1:032x}-{number + 1:016x}-01"


def traces_are_whole(second: Second, requests: int) -> None:
    """Each request is one trace below its client's span, through the processes; one of them pulled."""

    def traces() -> list[dict[str, Seen]]:
        numbers = [f"{number + 1:032x}" for number in range(requests)]
        return [{span.name: span for span in second.collector.spans() if span.trace_id == each} for each in numbers]

    # A collector gets a process's spans some seconds later.
    last = {"replica", "call", f"POST {CHAT}"}  # each process ends them after what is in them
    eventually(lambda: all(last <= trace.keys() for trace in traces()))
    for number, trace in enumerate(traces()):
        root, call, replica = trace[f"POST {CHAT}"], trace["call"], trace["replica"]
        assert root.parent_id == f"{number + 1:016x}"
        for name, parent in {
            "read": root,
            "wait": root,
            "prepare": root,
            "call": root,
            "decision": call,
            "replica": call,
            "queue": replica,
            "prefill": replica,
            "decode": replica,
        }.items():
            part = trace.pop(name)
            assert part.parent_id == parent.span_id, name
            assert parent.start_ns <= part.start_ns <= part.end_ns <= parent.end_ns, name  # one machine's clock
            role = "ingress" if parent is root or name == "decision" else "replica"
            assert second.collector.roles[part.span_id] == role
        assert root.attributes["gen_ai.usage.cache_read.input_tokens"] >= PREFIX_TOKENS - 16
    waited = [trace["pull"] for trace in traces() if "pull" in trace]
    copied = [pull.attributes for pull in waited if not pull.attributes["warmpath.joined"]]
    assert [(pull["warmpath.outcome"], pull["warmpath.pulled_tokens"] > 5000) for pull in copied] == [("whole", True)]


def test_a_killed_holder_costs_time_only(url: str) -> None:
    """SIGKILL while the other replica waits for its blocks: every request is answered, as if nothing had been.

    docs/pull.md
    """
    system = text(PREFIX_TOKENS, 2)

    killed: list[str] = []

    async def run() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:

            async def begins(count: float) -> None:
                """Ask until a pull has begun: the holder answers nothing, so that its queue only grows."""
                for number in range(MOST_QUESTIONS):
                    request = body(system, text(600, 200 + number))
                    pending.append((request, asyncio.create_task(ask(client, request))))
                    if number >= 5:  # at first all at once, as they would come
                        await asyncio.sleep(0.5)
                        if await asyncio.to_thread(begun, url) > count:
                            return
                await asyncio.to_thread(eventually, lambda: begun(url) > count)

            def blocks() -> dict[str, int]:
                return {name: replica["blocks"].get("pool", 0) for name, replica in replicas_of(url).items()}

            wait_for_replicas(url, 2)
            before = blocks()
            first = body(system, "first")
            await ask(client, first)
            await asyncio.to_thread(wait_until_cached, url, first, PREFIX_TOKENS - 16)
            after = blocks()
            holder = max(before, key=lambda name: after[name] - before[name])
            killed.append(holder)
            pid, count = int(replicas_of(url)[holder]["pid"]), begun(url)
            pending: list[tuple[dict[str, Any], asyncio.Task[dict[str, Any]]]] = []
            os.kill(pid, signal.SIGSTOP)  # so that it cannot hand over anything before it is killed
            try:
                await begins(count)
            finally:
                os.kill(pid, signal.SIGKILL)
            answers = await asyncio.gather(*(task for _, task in pending))
            await asyncio.to_thread(eventually, lambda: ended(url, "holder_lost") + ended(url, "late") > 0)
            computed = await ask(client, {**pending[-1][0], "cache_salt": "alone"})
            assert computed["choices"] == answers[-1]["choices"]

    asyncio.run(run())
    wait_for_replicas(url, 2, killed)
