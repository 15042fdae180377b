"""From generated tokens to the text of an answer, piece by piece, its choices merged into one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Protocol

import msgspec

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


class Piece(msgspec.Struct, frozen=True):
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


SplitPiece = Callable[[Piece], list[Piece]]
"""Reads tool calls out of a piece's text; the last of what it returns may end the choice."""


class ChoiceReader:
    """Tokens of one choice become pieces, the last with a finish reason. ``split``: None where no calls are read."""

    def __init__(self, index: int, generation: Generation, reader: AnswerReader, split: SplitPiece | None) -> None:
        self._index = index
        self._before = generation.echo
        self._reader = reader
        self._split = split

    def read(self, tokens: Tokens) -> list[Piece]:
        """Return the pieces that these tokens complete. Raises GenerationFailed where the generation broke off."""
        reader = self._reader
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
        if self._before:
            text, self._before = self._before + text, ""
        told = reader.told(ended=reason is not None and not stopped)
        ended_by = reader.stop_sequence if stopped else ""
        piece = Piece(
            self._index, text, taken, tokens.cached_tokens, reason, tokens.save, logprobs=told, stop_sequence=ended_by
        )
        return [piece] if self._split is None else self._split(piece)


async def choice_pieces(
    generation: Generation, source: TokenSource, reader: ChoiceReader
) -> AsyncGenerator[Piece, None]:
    """Yield one choice's pieces; closing it cancels the generation."""
    async with aclosing(source.generate(generation)) as stream:
        async for tokens in stream:
            for piece in reader.read(tokens):
                yield piece
                if piece.finish_reason is not None:
                    return


async def answer_pieces(
    generations: list[Generation],
    source: TokenSource,
    make_decoder: Callable[[], Detokenizer],
    stop: tuple[str, ...],
    place: Place,
    make_split: Callable[[], SplitPiece] | None = None,
    *,
    include_stop: bool = False,
) -> AsyncGenerator[Piece, None]:
    """Yield the pieces of all choices as they come; as many run at once as ``place`` has units, which end with them.

    ``make_split``: what reads tool calls out of a choice's text. ``include_stop``: a stop string is the last part of
    its answer. One failing choice ends all; closing it cancels all.
    """

    def begin(index: int, generation: Generation) -> AsyncGenerator[Piece, None]:
        reader = AnswerReader(generation.sampling, make_decoder(), stop, include_stop=include_stop)
        split = None if make_split is None else make_split()
        return choice_pieces(generation, source, ChoiceReader(index, generation, reader, split))

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
