"""What a completion tells the front door of its cost, whatever becomes of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import numpy as np
import pytest
from starlette.requests import Request

from router.protocol.block_hash import PrefixScope
from serve_app.api.openai.request import parse_chat
from serve_app.api.openai.response import ChatFormat
from serve_app.config.tenants import TenantConfig
from serve_app.engine.protocol import SamplingParams
from serve_app.errors import Overloaded, RateLimited
from serve_app.fairness.front_door import FrontDoor
from serve_app.fairness.rate_limits import TenantLimits
from serve_app.fairness.shares import Shares
from serve_app.generation.generation import Generation, Tokens
from serve_app.generation.tool_calls.tool_calls import ToolCalls
from serve_app.ingress.completions import Completions
from serve_app.ingress.observe.metrics import IngressMetrics
from serve_app.ingress.stopping import Stopping
from serve_app.tenants.tenants import Tenant
from serve_app.tenants.usage import UsageTable

GENERATION = Generation(
    request_id="r",
    token_ids=np.arange(100, dtype=np.int32),
    block_hashes=b"",
    scope=PrefixScope("m", "", b"salt"),
    root=b"r" * 32,
    placement_key=b"k" * 16,
    tenant="acme",
    sampling=SamplingParams(max_tokens=1),
)


class Source:
    """Answers with one token, or fails before it."""

    fails = False

    async def generate(self, generation: Generation) -> AsyncGenerator[Tokens, None]:
        if self.fails:
            raise Overloaded("There is no replica now.")
        yield Tokens((1,), 0, "length")


def test_a_request_that_was_not_answered_teaches_no_cost() -> None:
    """Whoever leaves, or fails, before the first token would get ever cheaper turns."""
    source, door = Source(), FrontDoor(Shares({}), places=lambda: 4, max_waiting=9, max_bytes=1 << 20)
    preparer, tokenizer = AsyncMock(), MagicMock()
    preparer.prepare.return_value = [GENERATION]
    tokenizer.decoder().push.return_value = "x"
    tokenizer.decoder().flush.return_value = ""
    completions = Completions(
        preparer,
        source,
        tokenizer,
        ToolCalls(None, reads_tools=False),
        IngressMetrics(),
        UsageTable(),
        door,
        Stopping(),
        request_timeout_s=60,
    )
    wanted = parse_chat(b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}')

    async def stays() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def ask() -> None:
        request = Request({"type": "http", "method": "POST", "headers": []}, stays)
        with door.arrive("acme") as arrival:
            arrival.grow(1000)
            await completions.respond(request, wanted, ChatFormat(), Tenant("acme"), arrival, time.perf_counter())

    guess = door.cost_tokens("acme", 1000)
    source.fails = True
    with pytest.raises(Overloaded):
        asyncio.run(ask())
    assert door.cost_tokens("acme", 1000) == guess
    source.fails = False
    asyncio.run(ask())
    assert 100 <= door.cost_tokens("acme", 1000) < guess


def test_a_request_pays_for_its_prompt_and_what_was_generated() -> None:
    """What was reserved for more is given back; who is refused before the first token pays nothing, whoever asked."""
    config = TenantConfig.model_validate({"name": "acme", "key_sha256": ["a" * 64], "tokens_per_minute": 300})
    clock = MagicMock(return_value=0.0)
    limits = TenantLimits([config], clock=clock)
    door = FrontDoor(Shares({}), places=lambda: 4, max_waiting=9, max_bytes=1 << 20, limits=limits)
    source, preparer, tokenizer = Source(), AsyncMock(), MagicMock()
    preparer.prepare.return_value = [replace(GENERATION, sampling=SamplingParams(max_tokens=50)) for _ in range(2)]
    tokenizer.decoder().push.return_value = "x"
    tokenizer.decoder().flush.return_value = ""
    completions = Completions(
        preparer, source, tokenizer, IngressMetrics(), UsageTable(), door, Stopping(), request_timeout_s=60
    )
    wanted = parse_chat(b'{"model": "m", "n": 2, "messages": [{"role": "user", "content": "hi"}]}')

    async def stays() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def ask() -> None:
        request = Request({"type": "http", "method": "POST", "headers": []}, stays)
        with door.arrive("acme") as arrival:
            await completions.respond(request, wanted, ChatFormat(), Tenant("acme"), arrival, time.perf_counter())

    def left() -> int:
        found = limits.left("acme")
        assert found is not None and found.tokens is not None
        return found.tokens.remaining

    source.fails = True
    with pytest.raises(Overloaded):
        asyncio.run(ask())
    assert left() == 300
    source.fails = False
    asyncio.run(ask())
    assert left() == 300 - 100 - 2
    with pytest.raises(RateLimited, match="asks for 200") as caught:
        asyncio.run(ask())
    assert (left(), caught.value.retry_after_s) == (198, pytest.approx(0.4))
