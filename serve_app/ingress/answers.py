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

from serve_app.api import format as sse
from serve_app.api.format import AnswerFormat, AnswerHead, AnswerStream
from serve_app.api.request import ignored_fields
from serve_app.engine.protocol import SaveResult
from serve_app.errors import GenerationFailed, WarmpathError
from serve_app.fairness.queue import Place
from serve_app.generation.answer import Piece, PieceSink
from serve_app.generation.request_usage import save_warning
from serve_app.generation.tool_calls.call_reader import WholeChoice
from serve_app.ingress.client_headers import Connection, connection_of
from serve_app.ingress.conversation import Conversation
from serve_app.ingress.drain import LAST_EVENT_S, Deadline
from serve_app.ingress.http import ADVICE, PROMPT_RULES, WARNING, json_response, until_disconnect
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


class EventStream(Response):
    """An answer as server-sent events, written directly to the connection; ``opening``: its first piece."""

    def __init__(self, answer: Answer, opening: Piece) -> None:
        headers = _headers(answer, opening.first.save if opening.first is not None else None)
        super().__init__(headers={**sse.HEADERS, **headers, "content-type": sse.CONTENT_TYPE})
        del self.headers["content-length"]
        self._answer = answer
        self._opening = opening

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer."""
        answer, stream = self._answer, self._answer.format.stream(self._answer.head)
        try:
            async with until_disconnect(Request(scope, receive)):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                last = await self._events(stream, connection_of(scope, send))
                # A client that stopped reading may have reached its deadline: it gets a little more time for this.
                remaining_s = max(0.0, answer.deadline.at_s - time.perf_counter()) + LAST_EVENT_S
                async with asyncio.timeout(remaining_s):
                    await send({"type": "http.response.body", "body": last, "more_body": False})
        except TimeoutError:
            logger.info("stream %s ends without its last event: its client does not read", answer.head.answer_id)
        except (ClientDisconnect, asyncio.CancelledError) as error:
            answer.meter.client_left()
            if isinstance(error, asyncio.CancelledError):
                raise

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
    meter, wanted = answer.meter, answer.meter.request
    choices = [WholeChoice(tells_logprobs=wanted.logprobs is not None) for _ in meter.generations]
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
    made = response() if wanted.told_prompt is None else await asyncio.to_thread(response)
    if isinstance(answer.format, Conversation):
        await answer.format.keep()
    return made


async def streamed(answer: Answer) -> Response:
    """Return an answer as a stream, after its first piece: earlier errors have a status. Raises a ``WarmpathError``."""
    async with AsyncExitStack() as ending:
        await ending.enter_async_context(answer)
        async with answer.deadline.limit():
            first = await anext(answer.pieces)
        ending.pop_all()  # from here on, the stream ends the answer
    return EventStream(answer, first)


def _headers(answer: Answer, save: SaveResult | None) -> dict[str, str]:
    """Return headers with the version of the registered prompt, a warning for each unmet wish, and advice."""
    meter = answer.meter
    prompt = meter.generations[0].prompt_ref
    unenforced = meter.generations[0].warning
    warnings = (
        save_warning(save, meter.usage.asked_by),
        ignored_fields(meter.request.unknown),
        unenforced,
        answer.head.note,
    )
    headers = {
        "x-warmpath-prompt": prompt,
        ADVICE: meter.advice(),
        PROMPT_RULES: ", ".join(meter.request.prompt_rules),
        WARNING: "; ".join(filter(None, warnings)),
    }
    return {name: value for name, value in headers.items() if value}
