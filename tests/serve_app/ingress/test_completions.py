"""What a completion tells the front door of its cost, whatever becomes of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest
from starlette.requests import Request

from serve_app.api.openai.request import parse_chat
from serve_app.api.openai.response import ChatFormat
from serve_app.config.app import AppConfig
from serve_app.config.tenants import TenantConfig
from serve_app.engine.protocol import SamplingParams
from serve_app.errors import Overloaded, RateLimited
from serve_app.fairness.front_door import FrontDoor
from serve_app.fairness.rate_limits import TenantLimits
from serve_app.fairness.shares import Shares
from serve_app.fairness.workers import FairWorkers
from serve_app.generation.generation import Generation, Tokens
from serve_app.generation.tool_calls.reader import AnswerReaders
from serve_app.ingress.completions import Completions
from serve_app.ingress.drain import Drain
from serve_app.tenants.tenants import Tenant
from tests.serve_app.ingress.scripted import GENERATION, counters


class Source:
    """Answers with one token, or fails before it."""

    fails = False

    async def generate(self, generation: Generation) -> AsyncGenerator[Tokens, None]:
        if self.fails:
            raise Overloaded("There is no replica now.")
        yield Tokens((1,), 0, "length")


class Bench:
    """One ingress' way of answering, in front of a ``Source``, for generations that stand fast."""

    def __init__(self, generations: list[Generation], limits: TenantLimits | None = None, **fields: Any) -> None:
        self.source = Source()
        self.door = FrontDoor(Shares({}), places=lambda: 4, max_waiting=9, max_bytes=1 << 20, limits=limits)
        preparer, tokenizer = AsyncMock(), MagicMock()
        preparer.prepare.return_value = generations
        tokenizer.decoder().push.return_value = "x"
        tokenizer.decoder().flush.return_value = ""
        workers, config = FairWorkers(Shares({})), AppConfig(model="m")
        self.completions = Completions(
            config,
            preparer,
            self.source,
            tokenizer,
            AnswerReaders(tokenizer, "auto"),
            counters(self.door),
            workers,
            Drain(),
        )
        wanted = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
        self.body = json.dumps(wanted).ljust(1000).encode()

    def ask(self) -> None:
        """Answer one request of the tenant acme."""

        async def answer() -> None:
            messages = asyncio.Queue[dict[str, Any]]()  # the client stays
            messages.put_nowait({"type": "http.request", "body": self.body})
            request = Request({"type": "http", "method": "POST", "headers": []}, messages.get)
            await self.completions.generate(request, Tenant("acme"), parse_chat, ChatFormat())

        asyncio.run(answer())


def test_a_request_that_was_not_answered_teaches_no_cost() -> None:
    """Whoever leaves, or fails, before the first token would get ever cheaper turns."""
    bench = Bench([GENERATION])
    guess = bench.door.cost_tokens("acme", 1000)
    bench.source.fails = True
    with pytest.raises(Overloaded):
        bench.ask()
    assert bench.door.cost_tokens("acme", 1000) == guess
    bench.source.fails = False
    bench.ask()
    assert 100 <= bench.door.cost_tokens("acme", 1000) < guess


def test_a_request_pays_for_its_prompt_and_what_was_generated() -> None:
    """What was reserved for more is given back; who is refused before the first token pays nothing, whoever refused.

    docs/tenants.md
    """
    config = TenantConfig.model_validate({"name": "acme", "key_sha256": ["a" * 64], "tokens_per_minute": 300})
    limits = TenantLimits([config], clock=lambda: 0.0)
    bench = Bench([replace(GENERATION, sampling=SamplingParams(max_tokens=50)) for _ in range(2)], limits, n=2)

    def left() -> int:
        found = limits.left("acme")
        assert found is not None and found.tokens is not None
        return found.tokens.remaining

    bench.source.fails = True
    with pytest.raises(Overloaded):
        bench.ask()
    assert left() == 300
    bench.source.fails = False
    bench.ask()
    assert left() == 300 - 100 - 2
    with pytest.raises(RateLimited, match="asks for 200") as caught:
        bench.ask()
    assert (left(), caught.value.retry_after_s) == (198, pytest.approx(0.4))
