"""An answer on its way out: it ends at its time, whatever its client does, and its events skip the layers around it."""

from __future__ import annotations

import asyncio
import pickle
import re
import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.format import AnswerHead
from serve_app.api.openai.request import parse_completion
from serve_app.api.openai.response import CompletionFormat
from serve_app.errors import GenerationFailed
from serve_app.fairness.front_door import FrontDoor
from serve_app.fairness.rate_limits import TenantLimits
from serve_app.fairness.shares import Budget, Shares
from serve_app.fairness.waiting_line import WaitingLine
from serve_app.generation.answer import Piece
from serve_app.ingress.answers import Answer, EventStream, streamed
from serve_app.ingress.client_headers import ClientHeaders, connection_send
from serve_app.ingress.drain import Deadline, Drain
from serve_app.ingress.observe.answer_meter import AnswerMeter
from serve_app.ingress.observe.metrics import IngressMetrics
from tests.serve_app.ingress.scripted import GENERATION, PATIENCE_S, counters, server

WANTED = parse_completion(b'{"model": "m", "prompt": "x", "stream": true}')


class Pieces:
    """Pieces of a choice, endless or as many as there are texts; ``closed`` once nobody takes more."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self.closed = asyncio.Event()

    async def come(self) -> AsyncGenerator[Piece, None]:
        try:
            while not self.texts:
                yield Piece(0, "x" * 100_000, 1)
                await asyncio.sleep(0)
            for text in self.texts[:-1]:
                yield Piece(0, text, 1)
            yield Piece(0, self.texts[-1], 1, finish_reason="stop")
        finally:
            self.closed.set()


async def answer(pieces: AsyncGenerator[Piece, None], timeout_s: float = 60) -> tuple[Answer, IngressMetrics]:
    """An answer that begins now."""
    counted = counters(FrontDoor(Shares({}), places=lambda: 1, max_waiting=1, max_bytes=1))
    meter = AnswerMeter(counted, WANTED, [GENERATION], 0.0, 1, TenantLimits().begin("acme"), None)
    deadline = Deadline(Drain(), time.perf_counter() + timeout_s, timeout_s)
    place = await WaitingLine(Budget(Shares({}), lambda: 1)).enter("acme", 1, 1)
    return Answer(CompletionFormat(), AnswerHead("a", 0, "m"), pieces, place, meter, deadline), counted.metrics


def counted(metrics: IngressMetrics, name: str = "warmpath_requests_in_flight") -> float:
    return next(value for found, _, value in metrics.samples() if found == name)


def test_a_stream_that_nobody_takes_ends_at_its_deadline() -> None:
    """Its source is closed: flow control would hold it as long as the client holds the connection."""

    async def run() -> float:
        pieces = Pieces()
        made, metrics = await answer(pieces.come(), timeout_s=0.2)

        async def respond(_: Request) -> Response:
            return await streamed(made)

        async with server(respond) as (_, writer):
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await asyncio.wait_for(pieces.closed.wait(), PATIENCE_S)
            await asyncio.sleep(0)
            return counted(metrics)

    assert asyncio.run(run()) == 0


def test_an_answer_whose_time_is_over_says_so() -> None:
    """Before its first piece as an error with a status, behind it as the stream's last event."""

    async def never() -> AsyncGenerator[Piece, None]:
        await asyncio.Event().wait()
        yield Piece(0, "")

    async def run() -> bytes:
        late, metrics = await answer(never(), timeout_s=0.05)
        with pytest.raises(GenerationFailed, match="took over"):
            await streamed(late)
        assert (counted(metrics), late.place.units) == (0, 0)
        begun, _ = await answer(Pieces().come(), timeout_s=0.05)
        sent: list[dict[str, Any]] = []

        async def send(message: Any) -> None:
            sent.append(message)

        response = await streamed(begun)
        await response({"type": "http", "method": "GET", "headers": []}, _stays, send)
        assert not sent[-1]["more_body"]
        return bytes(sent[-1]["body"])

    assert b'"code":"timeout"' in asyncio.run(run())


def test_events_pass_no_layer_but_the_start_and_the_end_do() -> None:
    """Layers around the application learn the status and the end; events between go straight to the connection."""
    connection: list[str] = []
    layer: list[str] = []

    async def run() -> bytes:
        made, _ = await answer(Pieces("one", "two", "three").come())
        response = await streamed(made)
        assert isinstance(response, EventStream)
        body = b""

        async def to_connection(message: Any) -> None:
            nonlocal body
            connection.append(message["type"])
            body += message.get("body", b"")

        async def application(scope: Any, receive: Any, send: Any) -> None:
            async def through_layer(message: Any) -> None:
                layer.append(message["type"])
                await send(message)

            await response(scope, receive, through_layer)

        await ClientHeaders(application)({"type": "http", "headers": []}, _stays, to_connection)
        return body

    body = asyncio.run(run())
    assert layer == ["http.response.start", "http.response.body"]
    assert connection == ["http.response.start", *["http.response.body"] * 4]
    assert re.search(rb"one.*two.*three.*\[DONE\]", body, re.DOTALL)


def test_a_connection_of_another_loop_is_left_to_serve() -> None:
    """By default Serve runs the application in a loop of its own; and a proxy of Serve pickles what it knows."""
    scope: dict[str, Any] = {"type": "http", "headers": []}

    async def send(message: Any) -> None: ...

    async def server(scope: Any, receive: Any, direct: Any) -> None:
        assert connection_send(scope, send) is direct
        assert connection_send(pickle.loads(pickle.dumps(scope)), send) is send  # noqa: S301  # its own

    async def application() -> bool:
        return connection_send(scope, send) is send

    asyncio.run(ClientHeaders(server)(scope, _stays, _stays))
    assert asyncio.run(application())


def test_a_client_that_leaves_ends_the_answer() -> None:
    """What was under way is closed and counted, and the client is counted as one that left."""

    async def run() -> tuple[float, float]:
        pieces = Pieces()
        made, metrics = await answer(pieces.come())
        response = await streamed(made)
        sent = asyncio.Event()

        async def receive() -> dict[str, Any]:
            await sent.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message.get("body"):
                sent.set()

        await asyncio.wait_for(response({"type": "http", "headers": []}, receive, send), PATIENCE_S)
        assert pieces.closed.is_set()
        return counted(metrics), counted(metrics, "warmpath_client_disconnects_total")

    assert asyncio.run(run()) == (0, 1)


async def _stays() -> dict[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError
