"""The server that other routers are put in front of: OpenAI's answers from one engine, without Ray."""

from __future__ import annotations

import asyncio

import httpx

from benchmarks.common.client import stream_answer
from benchmarks.peers.plain_server import application
from serve_app.config.app import AppConfig


def test_it_answers_reuses_and_refuses_as_a_replica_does() -> None:
    """A repeat finds the prefix, the model is listed, and what can never fit is a 400 in OpenAI's shape."""
    app = application(AppConfig(model="demo", engine="simulated", num_blocks=64, simulated_prefill_tokens_per_s=1e6))
    body = {"model": "demo", "prompt": "The quick brown fox. " * 40, "max_tokens": 3, "temperature": 0}

    async def run() -> None:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://plain") as client:
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/v1/models")).json()["data"][0]["id"] == "demo"
            first = await stream_answer(client, "/v1/completions", body)
            again = await stream_answer(client, "/v1/completions", body)
            assert first.cached_tokens == 0
            assert again.cached_tokens >= first.prompt_tokens - 17
            assert first.completion_tokens == again.completion_tokens == 3
            long = await client.post("/v1/completions", json={**body, "prompt": "word " * 5000})
            assert long.status_code == 400
            assert "message" in long.json()["error"]

    asyncio.run(run())
