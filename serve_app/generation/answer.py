"""From generated tokens to the text of an answer, piece by piece, its choices merged into one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from serve_app.api.format import FinishReason, ToldToken
from serve_app.api.tool_calls import CallEvent
from serve_app.engine.protocol import SaveResult
from serve_app.errors import GenerationFailed
from serve_app.fairness.waiting_line import Place
from serve_app.generation.generation import Generation, Tokens
from serve_app.generation.reading import AnswerReader
from serve_app.tokenization.detokenizer import Detokenizer

STARTED_AT_ONCE = 4
"""Choices of one request that are sent in one round of the loop: a hundred would hold everybody else up."""


class TokenSource(Protocol):
    """Where generated tokens come from."""

    def generate(self, generation: Generation) -> AsyncGenerator[Tokens, None]:
        """Yield a sequence's tokens as they come; the last item has a finish reason. Raises a ``WarmpathError``."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that one choice gained (maybe none), and then ``calls``. ``cached_tokens``, ``save``: in its first alone.

    ``logprobs``: of the tokens that begin within the text, where they were asked for. ``stop_sequence``: which stop
    string ended the choice, in its last.
    """

    index: int
    text: str
    new_tokens: int = 0
    cached_tokens: int | None = None
    finish_reason: FinishReason | None = None
    save: SaveResult | None = None
    calls: tuple[CallEvent, ...] = ()
    logprobs: tuple[ToldToken, ...] = ()
    stop_sequence: str = ""


Pieces = AsyncGenerator[Piece, None]


async def choice_pieces(
    index: int, generation: Generation, source: TokenSource, reader: AnswerReader
) -> AsyncGenerator[Piece, None]:
    """Yield one choice's pieces; the last has a finish reason. Closing it cancels the generation."""
    before = generation.echo
    async with aclosing(source.generate(generation)) as stream:
        async for tokens in stream:
            text, taken, stopped = reader.read(tokens)
            reason: FinishReason | None = None
            if not stopped and tokens.finish_reason is not None:
                if tokens.finish_reason not in ("stop", "length"):
                    raise GenerationFailed("The generation was broken off; send the request again.")
                rest, stopped = reader.finish()
                text += rest
                reason = tokens.finish_reason
            if stopped:
                reason = "stop"
            told = reader.told(ended=reason is not None and not stopped)
            ended_by = reader.stop_sequence if stopped else ""
            yield Piece(index, before + text, taken, tokens.cached_tokens, reason, tokens.save, (), told, ended_by)
            before = ""
            if reason is not None:
                return


async def answer_pieces(
    generations: list[Generation],
    source: TokenSource,
    make_decoder: Callable[[], Detokenizer],
    stop: tuple[str, ...],
    place: Place,
    reading: Callable[[Pieces], Pieces] = lambda pieces: pieces,
    *,
    include_stop: bool = False,
) -> AsyncGenerator[Piece, None]:
    """Yield the pieces of all choices as they come; as many run at once as ``place`` has units, which end with them.

    ``reading``: what the pieces of each choice go through. ``include_stop``: a stop string is the last part of its
    answer. One failing choice ends all; closing it cancels all.
    """

    def begin(index: int, generation: Generation) -> Pieces:
        reader = AnswerReader(generation.sampling, make_decoder(), stop, include_stop=include_stop)
        return reading(choice_pieces(index, generation, source, reader))

    try:
        if len(generations) == 1:
            async with aclosing(begin(0, generations[0])) as stream:
                async for piece in stream:
                    yield piece
            return
        ready: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()
        streams = (begin(index, generation) for index, generation in enumerate(generations))

        async def pump() -> None:
            try:
                for stream in streams:
                    async with aclosing(stream):
                        async for piece in stream:
                            ready.put_nowait(piece)
                place.give_back(1)
                ready.put_nowait(None)
            except Exception as error:  # handed to the consumer, who raises it
                ready.put_nowait(error)

        pumps: list[asyncio.Task[None]] = []
        try:
            at_work = min(place.units, len(generations))
            for started in range(1, at_work + 1):
                pumps.append(asyncio.create_task(pump()))
                if started % STARTED_AT_ONCE == 0:
                    await asyncio.sleep(0)
            while at_work:
                item = await ready.get()
                if item is None:
                    at_work -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield item
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
    finally:
        place.give_back()
