"""Sends one answer: its pieces as server-sent events or as one body, in the format of its API."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve_app.api.format import AnswerFormat, AnswerHead, AnswerStream
from serve_app.api.request import GenerateRequest, ignored_fields
from serve_app.engine.protocol import SaveResult
from serve_app.errors import GenerationFailed, WarmpathError
from serve_app.fairness.queue import Place
from serve_app.generation.answer import Piece, PieceSink
from serve_app.generation.request_usage import save_warning
from serve_app.generation.tool_calls.call_reader import WholeChoice
from serve_app.ingress.client_headers import Connection
from serve_app.ingress.conversation import Conversation
from serve_app.ingress.drain import LAST_EVENT_S, Deadline
from serve_app.ingress.http import ADVICE, CLIENT_LEFT, PROMPT_RULES, WARNING, json_response, until_disconnect
from serve_app.ingress.lifeline import Lifeline, StreamResponse
from serve_app.ingress.observe.answer_meter import AnswerMeter

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's answer. As a context manager it ends the generations, frees the request's place and counts it."""

    format: AnswerFormat
    head: AnswerHead
    pieces: AsyncGenerator[Piece, None]
    sink: PieceSink
    place: Place
    meter: AnswerMeter
    deadline: Deadline

    async def __aenter__(self) -> Answer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.pieces.aclose()
        finally:
            self.place.give_back()  # unstarted pieces do not return it
            self.meter.end(error)


class EventStream(StreamResponse):
    """An answer as server-sent events, written directly to the connection; ``opening``: its first piece."""

    def __init__(self, answer: Answer, opening: Piece, lifeline: Lifeline | None) -> None:
        self._own = _headers(answer, opening.first.save if opening.first is not None else None)
        super().__init__(self._own)
        self._answer = answer
        self._opening = opening
        self._lifeline = lifeline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer."""
        answer, stream = self._answer, self._answer.format.stream(self._answer.head)
        lifeline = self._lifeline or Lifeline(scope, send, answer.format.sign)
        status = self.status_code
        try:
            async with until_disconnect(Request(scope, receive)):
                await lifeline.begin(self, self._own, send)
                last = await self._events(stream, lifeline.connection)
                lifeline.close()
                # A client that stopped reading may have reached its deadline: it gets a little more time for this.
                remaining_s = max(0.0, answer.deadline.at_s - time.perf_counter()) + LAST_EVENT_S
                async with asyncio.timeout(remaining_s):
                    await lifeline.settle()
                    await send({"type": "http.response.body", "body": last, "more_body": False})
        except TimeoutError:
            logger.info("stream %s ends without its last event: its client does not read", answer.head.answer_id)
        except (ClientDisconnect, asyncio.CancelledError) as error:
            status = CLIENT_LEFT
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            lifeline.close()
            self.ended(status)

    async def _events(self, stream: AnswerStream, connection: Connection) -> bytes:
        """Send all events except the last one, and return that: an error if the answer breaks off."""
        answer, meter = self._answer, self._answer.meter
        opened: set[int] = set()
        token_ids = answer.head.token_ids

        def events_of(piece: Piece) -> bytes:
            meter.add(piece)
            if token_ids is not None:
                token_ids.add(piece.index, piece.token_ids)
            events = b""
            if piece.index not in opened:
                opened.add(piece.index)
                events = stream.opening(piece.index, meter.usage.total())
            if piece.reasoning:
                events += stream.reasoning(piece.index, piece.reasoning)
            if piece.text or piece.logprobs:
                events += stream.text(piece.index, piece.text, piece.logprobs)
            for call in piece.calls:
                events += stream.call(piece.index, call)
            if piece.finish_reason is not None:
                events += stream.finish(piece.index, piece.finish_reason, piece.stop_sequence)
            return events

        answer.sink.open, answer.sink.write = connection.open, lambda piece: connection.write(events_of(piece))
        try:
            async with answer, answer.deadline.limit():
                await connection.send(events_of(self._opening))
                meter.sent(self._opening)
                async for piece in answer.pieces:
                    await connection.send(events_of(piece))
                    if piece.first is not None:
                        meter.sent(piece)
            await meter.usage.know_miss()
            last = stream.usage(meter.usage.total())
            if isinstance(answer.format, Conversation):
                await answer.format.keep()
        except WarmpathError as error:
            return stream.error(error)
        except Exception:
            logger.exception("stream %s failed", answer.head.answer_id)
            return stream.error(GenerationFailed("The answer broke off because of a fault on the server."))
        return last


async def whole(answer: Answer) -> Response:
    """Return an answer as one body. Raises a ``WarmpathError``."""
    meter, request = answer.meter, answer.meter.request
    choices = [WholeChoice(tells_logprobs=request.logprobs is not None) for _ in meter.generations]
    async with answer, answer.deadline.limit():
        async for piece in answer.pieces:
            meter.add(piece)
            meter.sent(piece)
            choices[piece.index].add(piece)
    await meter.usage.know_miss()

    def response() -> Response:
        body = answer.format.whole(answer.head, [choice.choice() for choice in choices], meter.usage.total())
        return json_response(body, headers=_headers(answer, meter.usage.save))

    # Those of long prompts take too long for the event loop.
    made = response() if request.told_prompt is None else await asyncio.to_thread(response)
    if isinstance(answer.format, Conversation):
        await answer.format.keep()
    return made


async def streamed(answer: Answer, lifeline: Lifeline | None = None) -> Response:
    """Return an answer as a stream, after its first piece: earlier errors are the guard's. Raises a ``WarmpathError``.

    ``lifeline``: what its client has been sent meanwhile; None: nothing.
    """
    async with AsyncExitStack() as ending:
        await ending.enter_async_context(answer)
        async with answer.deadline.limit():
            first = await anext(answer.pieces)
        ending.pop_all()  # from here on, the stream ends the answer
    return EventStream(answer, first, lifeline)


def _headers(answer: Answer, save: SaveResult | None) -> dict[str, str]:
    """Return headers with the version of the registered prompt, a warning for each unmet wish, and advice."""
    meter = answer.meter
    unmet = save_warning(save, meter.usage.asked_by), meter.generations[0].warning
    told = {"x-warmpath-prompt": meter.generations[0].prompt_ref, ADVICE: meter.advice()}
    return {**_nonempty(told), **request_headers(meter.request, answer.head.note, *unmet)}


def request_headers(request: GenerateRequest, note: str = "", *unmet: str) -> dict[str, str]:
    """Return headers with a warning for each unmet wish, ``note`` among them, and the rules for the prompt."""
    warnings = filter(None, (*unmet, ignored_fields(request.unknown), note))
    return _nonempty({PROMPT_RULES: ", ".join(request.prompt_rules), WARNING: "; ".join(warnings)})


def _nonempty(headers: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if value}
