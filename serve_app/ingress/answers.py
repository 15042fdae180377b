"""One answer on its way out: its pieces as server-sent events or as one body, in the format of its API."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from starlette.responses import Response

from serve_app.api.format import AnswerFormat, AnswerHead
from serve_app.api.unknown import UnknownField, ignored_fields
from serve_app.engine.protocol import SaveResult
from serve_app.errors import GenerationFailed, WarmpathError
from serve_app.generation.answer import Piece
from serve_app.generation.request_usage import RequestUsage
from serve_app.generation.saves import SAVE_FIELD, save_warning
from serve_app.generation.tool_calls.pieces import WholeChoice
from serve_app.ingress.http import json_response

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's answer while it comes. ``choices``: how many there are, over all prompts."""

    format: AnswerFormat
    head: AnswerHead
    pieces: AsyncGenerator[Piece, None]
    choices: int
    usage: RequestUsage
    tells_logprobs: bool


async def events(answer: Answer, first: Piece, client_left: Callable[[], None]) -> AsyncGenerator[bytes, None]:
    """Yield an answer as server-sent events; what is ready together for one piece leaves in one write.

    ``first``: its first piece. ``client_left`` is called where the stream is closed before its end.
    """
    stream, pieces, usage = answer.format.stream(answer.head), answer.pieces, answer.usage
    opened: set[int] = set()

    def framed(piece: Piece) -> bytes:
        usage.add(piece)
        written = b""
        if piece.index not in opened:
            opened.add(piece.index)
            written += stream.opening(piece.index, usage.total())
        if piece.text or piece.logprobs:
            written += stream.text(piece.index, piece.text, piece.logprobs)
        for call in piece.calls:
            written += stream.call(piece.index, call)
        if piece.finish_reason is not None:
            written += stream.finish(piece.index, piece.finish_reason, piece.stop_sequence)
        return written

    try:
        async with aclosing(pieces):
            yield framed(first)
            async for piece in pieces:
                written = framed(piece)
                if written:
                    yield written
    except WarmpathError as error:
        yield stream.error(error)
    except Exception:
        logger.exception("stream %s failed", answer.head.answer_id)
        yield stream.error(GenerationFailed("The answer broke off because of a fault on the server."))
    except BaseException:  # the client left: the stream was closed or its task cancelled
        client_left()
        raise
    else:
        await usage.know_miss()
        yield stream.usage(usage.total())


async def whole(answer: Answer, unknown: Sequence[UnknownField]) -> Response:
    """Return an answer as one body. Raises a ``WarmpathError``."""
    choices = [WholeChoice(tells_logprobs=answer.tells_logprobs) for _ in range(answer.choices)]
    async with aclosing(answer.pieces) as pieces:
        async for piece in pieces:
            answer.usage.add(piece)
            choices[piece.index].add(piece)
    await answer.usage.know_miss()
    body = answer.format.whole(answer.head, [choice.choice() for choice in choices], answer.usage.total())
    return json_response(body, headers=warning_headers(answer.usage.save, unknown, answer.usage.asked_by))


def warning_headers(
    save: SaveResult | None, unknown: Sequence[UnknownField], asked_by: str = SAVE_FIELD
) -> dict[str, str]:
    """Return ``x-warmpath-warning`` where something that was asked for could not be had; the answer itself is whole.

    ``asked_by``: the field that asked to save.
    """
    warning = "; ".join(filter(None, (save_warning(save, asked_by), ignored_fields(unknown))))
    return {"x-warmpath-warning": warning} if warning else {}
