"""From generated tokens to the text of an answer, piece by piece, its choices merged into one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from serve_app.api.format import FinishReason
from serve_app.api.tool_calls import CallEvent
from serve_app.engine.protocol import SaveResult
from serve_app.errors import GenerationFailed
from serve_app.fairness.waiting_line import Place
from serve_app.generation.generation import Generation, Tokens
from serve_app.tokenization.detokenizer import Detokenizer, StopChecker

STARTED_AT_ONCE = 4
"""Choices of one request that are sent in one round of the loop: a hundred would hold everybody else up."""


class TokenSource(Protocol):
    """Where generated tokens come from."""

    def generate(self, generation: Generation) -> AsyncGenerator[Tokens, None]:
        """Yield a sequence's tokens as they come; the last item has a finish reason. Raises a ``WarmpathError``."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that one choice gained (maybe none), and then ``calls``. ``cached_tokens``, ``save``: in its first alone."""

    index: int
    text: str
    new_tokens: int = 0
    cached_tokens: int | None = None
    finish_reason: FinishReason | None = None
    save: SaveResult | None = None
    calls: tuple[CallEvent, ...] = ()


Pieces = AsyncGenerator[Piece, None]


async def choice_pieces(
    index: int, generation: Generation, source: TokenSource, decoder: Detokenizer, stop: tuple[str, ...]
) -> AsyncGenerator[Piece, None]:
    """Yield one choice's pieces; the last has a finish reason. Closing it cancels the generation."""
    checker = StopChecker(stop)
    async with aclosing(source.generate(generation)) as stream:
        async for tokens in stream:
            text, taken, stopped = _shown(tokens.token_ids, decoder, checker, one_by_one=bool(stop))
            reason: FinishReason | None = None
            if not stopped and tokens.finish_reason is not None:
                if tokens.finish_reason not in ("stop", "length"):
                    raise GenerationFailed("The generation was broken off; send the request again.")
                rest, stopped = checker.push(decoder.flush())
                text += rest if stopped else rest + checker.flush()
                reason = tokens.finish_reason
            if stopped:
                reason = "stop"
            yield Piece(index, text, taken, tokens.cached_tokens, reason, tokens.save)
            if reason is not None:
                return


def _shown(
    token_ids: Sequence[int], decoder: Detokenizer, checker: StopChecker, *, one_by_one: bool
) -> tuple[str, int, bool]:
    """Return (text that is safe to show, tokens read for it, whether a stop string was found).

    ``one_by_one``: read no token behind the one that completes a stop string, so that usage counts the same tokens
    however they came: how many come at once is a matter of timing.
    """
    if not one_by_one:
        text, stopped = checker.push(decoder.push(token_ids))
        return text, len(token_ids), stopped
    shown = ""
    for taken, token_id in enumerate(token_ids, 1):
        text, stopped = checker.push(decoder.push((token_id,)))
        shown += text
        if stopped:
            return shown, taken, True
    return shown, len(token_ids), False


async def answer_pieces(
    generations: list[Generation],
    source: TokenSource,
    make_decoder: Callable[[], Detokenizer],
    stop: tuple[str, ...],
    place: Place,
    reading: Callable[[Pieces], Pieces] = lambda pieces: pieces,
) -> AsyncGenerator[Piece, None]:
    """Yield the pieces of all choices as they come; as many run at once as ``place`` has units, which end with them.

    ``reading``: what the pieces of each choice go through. One failing choice ends all; closing it cancels all.
    """

    def begin(index: int, generation: Generation) -> Pieces:
        return reading(choice_pieces(index, generation, source, make_decoder(), stop))

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
