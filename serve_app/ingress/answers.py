"""One answer on its way out: its pieces as server-sent events or as one body, in the format of its API."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from types import TracebackType

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve_app.api import sse
from serve_app.api.format import AnswerFormat, AnswerHead, AnswerStream
from serve_app.api.unknown import UnknownField, ignored_fields
from serve_app.engine.protocol import SaveResult
from serve_app.errors import GenerationFailed, WarmpathError
from serve_app.fairness.waiting_line import Place
from serve_app.generation.answer import Piece
from serve_app.generation.request_usage import SAVE_FIELD, save_warning
from serve_app.generation.tool_calls.reader import WholeChoice
from serve_app.ingress.client_headers import connection_send
from serve_app.ingress.drain import LAST_EVENT_S, Drain
from serve_app.ingress.http import json_response, until_disconnect
from serve_app.ingress.observe.answer_meter import AnswerMeter

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Deadline:
    """The moment of ``time.perf_counter`` until which a request is answered, ``timeout_s`` after it came."""

    drain: Drain
    at_s: float
    timeout_s: float

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """End the block then, or when the ingress stops. Raises the WarmpathError that says so."""
        try:
            async with self.drain.limit(self.at_s - time.perf_counter()):
                yield
        except TimeoutError as error:
            if self.drain.over:
                raise self.drain.broken_off() from error
            message = f"The answer took over {self.timeout_s:.0f} s; ask for fewer tokens."
            raise GenerationFailed(message, code="timeout") from error


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's answer while it comes; leaving it as a block ends what is under way, frees its place, counts it.

    ``choices``: how many there are, over all prompts.
    """

    format: AnswerFormat
    head: AnswerHead
    pieces: AsyncGenerator[Piece, None]
    choices: int
    place: Place
    meter: AnswerMeter
    deadline: Deadline
    tells_logprobs: bool

    async def __aenter__(self) -> Answer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.pieces.aclose()
        finally:
            self.place.give_back()  # pieces that have not begun give nothing back
            self.meter.end(error)


class EventStream(Response):
    """An answer as server-sent events, as an ASGI application; ``first``: its first piece.

    Events go straight to the connection; the start and the end pass the layers around the application.
    ``client_left`` hears of a client that does not stay to the end.
    """

    def __init__(self, answer: Answer, first: Piece, headers: dict[str, str], client_left: Callable[[], None]) -> None:
        super().__init__(headers={**sse.HEADERS, **headers, "content-type": sse.CONTENT_TYPE})
        del self.headers["content-length"]
        self._answer = answer
        self._first = first
        self._client_left = client_left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        answer, stream = self._answer, self._answer.format.stream(self._answer.head)
        try:
            async with until_disconnect(Request(scope, receive)):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                last = await self._events(stream, connection_send(scope, send))
                # A client that takes nothing may have come to the end of its time: it has a little more for this.
                remaining_s = max(0.0, answer.deadline.at_s - time.perf_counter()) + LAST_EVENT_S
                async with asyncio.timeout(remaining_s):
                    await send({"type": "http.response.body", "body": last, "more_body": False})
        except TimeoutError:
            logger.info("stream %s ends without its last event: its client takes nothing", answer.head.answer_id)
        except (ClientDisconnect, asyncio.CancelledError) as error:
            self._client_left()
            if isinstance(error, asyncio.CancelledError):
                raise

    async def _events(self, stream: AnswerStream, send: Send) -> bytes:
        """Send all events but the last; return that, which is an error's where the answer breaks off."""
        answer, meter = self._answer, self._answer.meter
        opened: set[int] = set()

        async def write(piece: Piece) -> None:
            meter.add(piece)
            events = b""
            if piece.index not in opened:
                opened.add(piece.index)
                events = stream.opening(piece.index, meter.usage.total())
            if piece.text or piece.logprobs:
                events += stream.text(piece.index, piece.text, piece.logprobs)
            for call in piece.calls:
                events += stream.call(piece.index, call)
            if piece.finish_reason is not None:
                events += stream.finish(piece.index, piece.finish_reason, piece.stop_sequence)
            if events:
                await send({"type": "http.response.body", "body": events, "more_body": True})

        try:
            async with answer, answer.deadline.limit():
                await write(self._first)
                meter.sent(self._first)
                async for piece in answer.pieces:
                    await write(piece)
                    if piece.cached_tokens is not None:
                        meter.sent(piece)
        except WarmpathError as error:
            return stream.error(error)
        except Exception:
            logger.exception("stream %s failed", answer.head.answer_id)
            return stream.error(GenerationFailed("The answer broke off because of a fault on the server."))
        await meter.usage.know_miss()
        return stream.usage(meter.usage.total())


async def whole(answer: Answer, unknown: Sequence[UnknownField], headers: dict[str, str]) -> Response:
    """Return an answer as one body. Raises a ``WarmpathError``."""
    choices = [WholeChoice(tells_logprobs=answer.tells_logprobs) for _ in range(answer.choices)]
    meter = answer.meter
    async with answer, answer.deadline.limit():
        async for piece in answer.pieces:
            meter.add(piece)
            meter.sent(piece)
            choices[piece.index].add(piece)
    await meter.usage.know_miss()
    body = answer.format.whole(answer.head, [choice.choice() for choice in choices], meter.usage.total())
    warnings = warning_headers(meter.usage.save, unknown, meter.usage.asked_by)
    return json_response(body, headers={**headers, **warnings})


async def streamed(
    answer: Answer, unknown: Sequence[UnknownField], headers: dict[str, str], client_left: Callable[[], None]
) -> Response:
    """Return an answer as a stream that has its first piece: errors before it still have a status of their own.

    Raises a ``WarmpathError``.
    """
    async with AsyncExitStack() as ending:
        await ending.enter_async_context(answer)
        async with answer.deadline.limit():
            first = await anext(answer.pieces)
        ending.pop_all()  # the stream ends it
    warnings = warning_headers(first.save, unknown, answer.meter.usage.asked_by)
    return EventStream(answer, first, {**headers, **warnings}, client_left)


def warning_headers(
    save: SaveResult | None, unknown: Sequence[UnknownField], asked_by: str = SAVE_FIELD
) -> dict[str, str]:
    """Return ``x-warmpath-warning`` where something that was asked for could not be had; the answer itself is whole.

    ``asked_by``: the field that asked to save.
    """
    warning = "; ".join(filter(None, (save_warning(save, asked_by), ignored_fields(unknown))))
    return {"x-warmpath-warning": warning} if warning else {}
