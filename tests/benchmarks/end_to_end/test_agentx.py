"""The sessions, the figures and the routers of `python -m benchmarks agentx`, without aiperf."""

import asyncio
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from benchmarks.common.agent_sessions import AgentSession, AgentStream, AgentTurn, read_sessions
from benchmarks.common.harness import rows_of
from benchmarks.common.report import BenchmarkError
from benchmarks.end_to_end import agentx
from benchmarks.end_to_end.agents import drawn
from benchmarks.peers.ray_prefix_proxy import RayPrefixProxy, prompt_text


def turn(blocks: int, known: int, pause_s: float = 2.0) -> AgentTurn:
    return AgentTurn(512 * blocks - 100, 50, pause_s, tuple(range(blocks)), 512 * known)


def test_a_session_keeps_its_pauses_and_sub_agents_begin_where_they_did() -> None:
    """A turn begins a pause after the answer before; an answer's time is that of an endless cache without a queue."""
    child = AgentStream((turn(2, 0), turn(3, 2)), after=0, delay_s=0.5)
    session = AgentSession((AgentStream((turn(4, 0), turn(6, 4), turn(7, 6))), child), 1024)
    trace = agentx.weka_trace("one", session, 8)
    first, agent, second, third = trace["requests"]
    assert [one["in"] for one in (first, second, third)] == [244, 372, 436]  # an eighth, rounded up
    assert trace["block_size"] * len(third["hash_ids"]) >= third["in"] > trace["block_size"] * 6
    assert first["api_time"] == pytest.approx(1948 / 24_500 + 50 * 0.0074)
    assert second["api_time"] == pytest.approx((2972 - 2048) / 24_500 + 50 * 0.0074)
    for before, after in pairwise((first, second, third)):
        assert after["t"] - before["t"] - before["api_time"] == pytest.approx(2.0) == after["think_time"]
    assert agent["t"] == agent["requests"][0]["t"] == pytest.approx(first["api_time"] + 0.5)
    last = agent["requests"][-1]
    assert agent["duration_ms"] == pytest.approx(1000 * (last["t"] + last["api_time"] - agent["t"]), abs=1)


def test_the_published_sessions_fit_the_demo_models_context() -> None:
    """With the defaults there are enough sessions, and none is longer than the model's 32k positions."""
    options = agentx.run.parse([])
    traces = [agentx.weka_trace(str(n), one, options.scale) for n, one in enumerate(drawn(read_sessions(), options))]
    assert len(traces) == options.sessions >= options.concurrency
    requests = [row for trace in traces for one in trace["requests"] for row in one.get("requests", [one])]
    assert 10_000 < max(row["in"] + row["out"] for row in requests) < 32_768
    json.dumps(traces, allow_nan=False)


def test_figures_are_parts_of_what_was_possible_and_a_system_that_fails_loses_its_row() -> None:
    """A missing metric is None; the ratio is to the best of those that ran."""
    export: dict[str, Any] = {
        "overall_usage_prompt_cache_read_pct": {"avg": 88.0},
        "theoretical_prefix_cache_hit": {"avg": 96.0},
        "time_to_first_token": {"avg": 300.0, "p50": 200.0, "p90": 700.0},
        "metadata": {"submission_valid": False, "submission_invalid_reasons": ["unsafe_override"]},
    }
    found = agentx.figures(export)
    assert found["of_theoretical"] == pytest.approx(88 / 96)
    assert (found["ttft_ms_mean"], found["ttft_ms_p90"], found["itl_ms_mean"]) == (300.0, 700.0, None)
    assert found["submission_invalid_reasons"] == ["unsafe_override"]

    def measure(name: str) -> dict[str, Any]:
        if name == "smg":
            raise BenchmarkError("there is no smg")
        return {**found, "ttft_ms_mean": {"warmpath": 300.0, "round_robin": 900.0, "ray_prefix": 400.0}[name]}

    results = rows_of(["warmpath", "smg", "round_robin", "ray_prefix"], measure)
    assert results["smg"] == {"not_measured": "there is no smg"}
    told = agentx.summary(results, agentx.run.parse(["--duration-s", "180"]))
    assert "best other: 0.75" in told and "smg was not measured" in told and "unsafe_override" in told


def test_every_model_is_served_by_the_name_that_sessions_ask_for() -> None:
    flags = agentx.server_flags(agentx.run.parse(["--engine", "torch", "--model", "smollm2"]))
    row = agentx.weka_trace("one", AgentSession((AgentStream((turn(4, 0),)),), 512), scale=8)
    served = flags[flags.index("--served-model-name") + 1]
    assert row["models"] == [served] == [row["requests"][0]["model"]]


def test_an_aiperf_that_fails_is_told_by_its_last_words(tmp_path: Path) -> None:
    """It ends without an export. Without the override, the scenario refuses local sessions at any duration."""
    tool = tmp_path / "aiperf"
    tool.write_text('#!/bin/sh\ncase "$*" in *--unsafe-override*) echo Scenario invariants violated;; esac; exit 1\n')
    tool.chmod(0o755)
    with pytest.raises(BenchmarkError, match=r"status 1:\nScenario invariants violated"):
        agentx.play("http://127.0.0.1:1", tmp_path, agentx.run.parse(["--aiperf", str(tool)]))
    with pytest.raises(BenchmarkError, match="make agentx"):
        agentx.play("http://127.0.0.1:1", tmp_path, agentx.run.parse(["--aiperf", str(tmp_path / "none")]))


@pytest.mark.anyio
async def test_rays_rule_keeps_a_conversation_at_its_server_and_passes_streams_on() -> None:
    """New prompts go to the server with the least text; bytes, status and query pass as they are."""
    pytest.importorskip("ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree")
    seen: Counter[str] = Counter()
    runners, urls = [], []

    async def started(app: web.Application) -> str:
        runner = web.AppRunner(app)
        await runner.setup()
        runners.append(runner)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    def server(name: str) -> web.Application:
        async def answer(request: web.Request) -> web.Response:
            seen[name] += request.method == "POST"
            return web.Response(status=201, text=f"data: {name}?{request.query_string}\n\n")

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        return app

    try:
        urls = [await started(server(name)) for name in "ab"]
        front = await started(RayPrefixProxy(urls).application())
        async with aiohttp.ClientSession() as client:

            async def ask(*texts: str) -> str:
                body = {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]} for text in texts]}
                async with client.post(f"{front}/v1/chat/completions?x=1", json=body) as answer:
                    assert answer.status == 201
                    return await answer.text()

            first, second = await ask("apples " * 50), await ask("bridges " * 50)
            assert {first, second} == {"data: a?x=1\n\n", "data: b?x=1\n\n"}
            for _ in range(3):
                assert await ask("apples " * 50, "more") == first
                assert await ask("bridges " * 50, "more") == second
            async with client.get(f"{front}/health") as answer:
                assert answer.status == 201
    finally:
        await asyncio.gather(*(runner.cleanup() for runner in runners))
    assert seen == {"a": 4, "b": 4}


def test_ray_compares_the_text_of_messages() -> None:
    """Of parts, strings and prompts alike."""
    assert prompt_text({"messages": [{"content": "a"}, {"content": [{"text": "b"}, "c"]}, {"content": None}]}) == "abc"
    assert prompt_text({"prompt": ["d", "e"]}) == "de"
    assert prompt_text({}) == ""
