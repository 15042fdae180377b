"""An answer ends at its deadline, regardless of the client, and reports its cost."""

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from datetime import UTC, datetime
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.format import AnswerHead
from serve_app.api.openai.request import parse_chat, parse_completion
from serve_app.api.openai.response import CHAT, COMPLETION
from serve_app.config.app import AppConfig
from serve_app.config.tenants import TenantConfig
from serve_app.engine.protocol import EngineOutput, EngineRequest, FirstToken, SamplingParams, TakeAtOnce
from serve_app.errors import GenerationFailed, Overloaded, RateLimited
from serve_app.fairness.front_door import FrontDoor
from serve_app.fairness.queue import FairWorkers, WaitingLine
from serve_app.fairness.rate_limits import TenantLimits
from serve_app.fairness.shares import Budget, Shares
from serve_app.generation.answer import Piece, PieceSink
from serve_app.generation.tool_calls.reader import AnswerReaders
from serve_app.ingress.answers import Answer, streamed
from serve_app.ingress.client_headers import ClientHeaders
from serve_app.ingress.drain import Deadline, Drain
from serve_app.ingress.lifeline import StreamResponse
from serve_app.ingress.model import Arrived
from serve_app.ingress.observe.answer_meter import (
    AnswerMeter,
    Observers,
    cost_observers,
    prompt_observers,
    trace_answer,
    usage_observers,
)
from serve_app.ingress.observe.metrics import IngressMetrics
from serve_app.prompts.registry import PromptTraffic
from serve_app.tenants import Tenant
from serve_app.usage import Counts, Ledger
from tests.serve_app.generation.outputs import output
from tests.serve_app.ingress.scripted import GENERATION, PATIENCE_S, partial_model, server

WANTED = parse_completion(b'{"model": "m", "prompt": "x", "stream": true}')
SCOPE: dict[str, Any] = {"type": "http", "method": "GET", "headers": []}
Send = Callable[[Any], Awaitable[None]]


def observed(metrics: IngressMetrics, door: FrontDoor, ledger: Ledger | None = None) -> Observers:
    """Return the observers of an ingress."""
    observers = usage_observers(ledger or Ledger(None, 16), metrics) + cost_observers(door)
    return observers + prompt_observers(PromptTraffic()) + Observers(refused=[metrics.refused], ended=[trace_answer])


class Streamed:
    """An answer of these texts, or an endless one, that begins now; ``closed`` is set at its end."""

    def __init__(self, *texts: str, timeout_s: float = 60) -> None:
        self.texts = texts
        self.timeout_s = timeout_s
        self.closed = asyncio.Event()
        self.metrics = IngressMetrics()

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        try:
            while not self.texts:
                yield Piece(0, "x" * 100_000, 1)
                await asyncio.sleep(0)
            for text in self.texts[:-1]:
                yield Piece(0, text, 1)
            yield Piece(0, self.texts[-1], 1, finish_reason="stop")
        finally:
            self.closed.set()

    async def respond(self, pieces: AsyncGenerator[Piece, None] | None = None) -> Response:
        meter = AnswerMeter(
            observed(self.metrics, front_door()),
            self.metrics,
            WANTED,
            [GENERATION],
            0.0,
            1,
            TenantLimits().begin("acme"),
            None,
        )
        deadline = Deadline(Drain(), time.perf_counter() + self.timeout_s, self.timeout_s)
        self.place = await WaitingLine(Budget(Shares({}), lambda: 1)).enter("acme", 1, 1)
        head = AnswerHead("a", 0, "m")
        shown, pieces = COMPLETION, pieces or self.pieces()
        return await streamed(Answer(shown, head, pieces, PieceSink(), self.place, meter, deadline))

    def counted(self, name: str = "requests_in_flight") -> float:
        samples = self.metrics.samples()
        return next(value for found, _, value in samples if found == f"warmpath_{name}")


def front_door(limits: TenantLimits | None = None) -> FrontDoor:
    return FrontDoor(Shares({}), places=lambda: 4, max_waiting=9, max_bytes=1 << 20, limits=limits)


async def stays() -> dict[str, Any]:
    """Wait forever: the client never leaves."""
    await asyncio.Event().wait()
    raise AssertionError


def test_a_stream_that_nobody_takes_ends_at_its_deadline() -> None:
    """Its source is closed: flow control would hold it as long as the client holds the connection."""

    async def run() -> float:
        answer = Streamed(timeout_s=0.2)
        async with server(lambda _: answer.respond()) as (_, writer):
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await asyncio.wait_for(answer.closed.wait(), PATIENCE_S)
            await asyncio.sleep(0)
            return answer.counted()

    assert asyncio.run(run()) == 0


def test_an_answer_past_its_deadline_is_an_error() -> None:
    """Before the first piece it is an error with a status, after it the stream's last event."""

    async def never() -> AsyncGenerator[Piece, None]:
        await asyncio.Event().wait()
        yield Piece(0, "")

    async def run() -> bytes:
        late, sent = Streamed(timeout_s=0.05), AsyncMock()
        with pytest.raises(GenerationFailed, match="took over"):
            await late.respond(never())
        assert (late.counted(), late.place.units) == (0, 0)
        assert not late.metrics.rings, "whoever sends the status counts it"
        broken = Streamed(timeout_s=0.05)
        response = await broken.respond()
        await response(SCOPE, stays, sent)
        assert sum(bucket["failed"] for bucket in broken.metrics.rings[GENERATION.tenant].values()) == 1
        last = sent.call_args.args[0]
        assert not last["more_body"]
        return bytes(last["body"])

    assert b'"code":"timeout"' in asyncio.run(run())


def test_events_pass_no_layer_but_the_start_and_the_end_do() -> None:
    """Layers around the application see the status and the end; events between go straight to the connection."""
    layer: list[str] = []

    async def run() -> list[Any]:
        response, connection = await Streamed("one", "two", "three").respond(), AsyncMock()

        async def application(scope: Any, receive: Any, send: Send) -> None:
            async def through_layer(message: Any) -> None:
                layer.append(message["type"])
                await send(message)

            await response(scope, receive, through_layer)

        await ClientHeaders(application)(dict(SCOPE), stays, connection)
        return [call.args[0] for call in connection.call_args_list]

    messages = asyncio.run(run())
    assert layer == ["http.response.start", "http.response.body"]
    assert [message["type"] for message in messages] == ["http.response.start", *["http.response.body"] * 4]
    body = b"".join(message.get("body", b"") for message in messages)
    assert re.search(rb"one.*two.*three.*\[DONE\]", body, re.DOTALL)


def test_a_client_that_leaves_ends_the_answer() -> None:
    """The running answer is closed and counted, and the client as one that left."""
    ended: list[int] = []

    async def run() -> float:
        answer, sent = Streamed(), asyncio.Event()
        response = await answer.respond()
        assert isinstance(response, StreamResponse)
        response.ended = ended.append

        async def receive() -> dict[str, Any]:
            await sent.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message.get("body"):
                sent.set()

        await asyncio.wait_for(response(SCOPE, receive, send), PATIENCE_S)
        assert answer.closed.is_set()
        return answer.counted()

    assert (asyncio.run(run()), ended) == (0, [499])


class Bench:
    """An ingress' answers for fixed generations, each with one token, or none if it fails."""

    fails = False

    def __init__(self, generations: list[EngineRequest], limits: TenantLimits | None = None, **fields: Any) -> None:
        self.door = front_door(limits)
        preparer, tokenizer = AsyncMock(), MagicMock()
        preparer.prepare.return_value = generations
        tokenizer.decoder().push.return_value = "x"
        tokenizer.decoder().flush.return_value = ""
        tokenizer.template.reads_tools = False
        readers, workers = AnswerReaders(tokenizer, "auto"), FairWorkers(Shares({}))
        metrics = IngressMetrics()
        self.model = partial_model(
            AppConfig(model="m"), preparer=preparer, source=self, tokenizer=tokenizer, readers=readers, metrics=metrics,
            observers=observed(metrics, self.door), front_door=self.door, workers=workers, drain=Drain(),
        )  # fmt: skip
        wanted = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
        self.request = parse_chat(json.dumps(wanted).encode())

    async def generate(
        self, generation: EngineRequest, *, at_once: TakeAtOnce | None = None
    ) -> AsyncGenerator[EngineOutput, None]:
        if self.fails:
            raise Overloaded("There is no replica now.")
        yield output((1,), FirstToken(0), "length")

    def ask(self, *, fails: bool = False) -> None:
        self.fails = fails

        async def answer() -> None:
            messages = asyncio.Queue[dict[str, Any]]()  # the client stays
            request = Request({**SCOPE, "method": "POST"}, messages.get)
            with self.door.arrive("acme") as arrival:
                arrival.grow(1000)
                await self.model.answer(
                    request, Arrived(self.request, Tenant("acme"), arrival, time.perf_counter()), CHAT
                )

        asyncio.run(answer())


def test_a_request_that_was_not_answered_teaches_no_cost() -> None:
    """Otherwise requests that leave, or fail, before the first token would get ever cheaper turns."""
    bench = Bench([GENERATION])
    guess = bench.door.cost_tokens("acme", 1000)
    with pytest.raises(Overloaded):
        bench.ask(fails=True)
    assert bench.door.cost_tokens("acme", 1000) == guess
    bench.ask()
    assert 100 <= bench.door.cost_tokens("acme", 1000) < guess


def test_a_request_pays_for_its_prompt_and_its_answer() -> None:
    """Unused reserved tokens are returned; a refusal before the first token costs nothing. (docs: tenants)"""
    config = TenantConfig.model_validate({"name": "acme", "key_sha256": ["a" * 64], "tokens_per_minute": 300})
    limits = TenantLimits([config], clock=lambda: 0.0)
    bench = Bench([structs.replace(GENERATION, sampling=SamplingParams(max_tokens=50)) for _ in range(2)], limits, n=2)

    def left() -> int:
        found = limits.left("acme")
        assert found is not None and found.tokens is not None
        return found.tokens.remaining

    with pytest.raises(Overloaded):
        bench.ask(fails=True)
    assert left() == 300
    bench.ask()
    assert left() == 300 - 100 - 2
    with pytest.raises(RateLimited, match="asks for 200") as caught:
        bench.ask()
    assert (left(), caught.value.retry_after_s) == (198, pytest.approx(0.4))


def test_each_token_after_the_first_is_a_gap_between_tokens() -> None:
    """A choice of 9 tokens has 8 gaps, however the tokens arrive; an end without a token is none."""
    answer = Streamed()
    meter = AnswerMeter(Observers(), answer.metrics, WANTED, [GENERATION], 0.0, 1, TenantLimits().begin("acme"), None)
    for new_tokens, first in ((2, FirstToken(0)), (1, None), (4, None), (2, None), (0, None)):
        meter.add(Piece(0, "x", new_tokens, first=first))
    begun_s = meter.last_s[0]
    meter.add(Piece(0, "", 0, finish_reason="stop"))
    assert meter.last_s[0] == begun_s
    gaps = answer.metrics.inter_token_s[GENERATION.tenant]
    assert gaps.count == 8
    assert 0.0 < gaps.total < 60.0


def test_cached_tokens_that_only_the_end_tells_are_charged_counted_and_explained() -> None:
    """A server elsewhere tells them last: 80 or none were expected, 0 or 64 came. No counter falls meanwhile."""
    now = datetime(2026, 1, 2, tzinfo=UTC)
    metrics, ledger = IngressMetrics(), Ledger(None, 16, now=lambda: now)
    explained: list[int] = []
    sent = Observers(sent=[lambda _, __, cached_tokens: explained.append(cached_tokens)])
    observers = observed(metrics, front_door(), ledger) + sent
    counted = []
    for expected, true in ((80, 0), (0, 64)):
        meter = AnswerMeter(observers, metrics, WANTED, [GENERATION], 0.0, 1, TenantLimits().begin("acme"), None)
        first = Piece(0, "x", 1, first=FirstToken(expected, expected=True))
        correction = FirstToken(true - expected, correction=True)
        for piece in (first, Piece(0, "y", 1, finish_reason="stop", first=correction)):
            meter.add(piece)
            meter.sent(piece)
            counted.append(metrics.totals()["acme"][2])
        meter.end(None)
        assert meter.usage.total().cached_tokens == true
        assert meter.usage.total().written_tokens == 96 - true
        assert meter.uncached_tokens == 100 - true
    assert explained == [0, 64]
    assert counted == [80, 80, 80, 80], "16 too much are still to be left out"
    ((_, counts),) = ledger.read("2026-01-02", "2026-01-02", "acme")
    assert counts == Counts(2, 1, 200, 64, 96 + 32, 4)
