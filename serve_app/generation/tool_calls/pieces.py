"""Pieces of an answer, with the tool calls read out of their text; and a whole choice made of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import replace

import msgspec

from serve_app.api.format import Choice, FinishReason, ToldToken
from serve_app.api.tool_calls import CallArguments, CallBegun, CallEnded, CallEvent, ToolCall
from serve_app.generation.answer import Piece
from serve_app.generation.tool_calls.reader import CallReader


async def pieces_with_calls(
    pieces: AsyncGenerator[Piece, None], reader: CallReader, *, parallel: bool
) -> AsyncGenerator[Piece, None]:
    """Yield a choice's pieces with their calls apart from their text; in each the text comes first.

    Without ``parallel`` the choice ends with its first call, and its generation too.
    """
    async with aclosing(pieces):
        async for piece in pieces:
            events = reader.push(piece.text)
            reason: FinishReason | None = piece.finish_reason
            if reason is not None:
                events += reader.flush()
            if not parallel:
                end = next((i for i, event in enumerate(events, 1) if isinstance(event, CallEnded)), None)
                if end is not None:
                    events, reason = events[:end], "stop"
            if reason == "stop" and reader.calls:
                reason = "tool_calls"
            stop_sequence = piece.stop_sequence
            *first, last = _in_order(events)
            for text, calls in first:
                yield replace(piece, text=text, calls=calls, finish_reason=None)
                piece = Piece(piece.index, "")
            yield replace(piece, text=last[0], calls=last[1], finish_reason=reason, stop_sequence=stop_sequence)
            if reason is not None:
                return


def _in_order(events: list[str | CallEvent]) -> Iterator[tuple[str, tuple[CallEvent, ...]]]:
    """Yield texts with the calls that follow each; at least once."""
    text = ""
    calls: list[CallEvent] = []
    for event in events:
        if not isinstance(event, str):
            calls.append(event)
        elif calls:
            yield text, tuple(calls)
            text, calls = event, []
        else:
            text += event
    yield text, tuple(calls)


class WholeChoice:
    """Gathers the pieces of one choice. A call whose arguments are no JSON of an object is text."""

    def __init__(self, *, tells_logprobs: bool = False) -> None:
        self._told: list[ToldToken] | None = [] if tells_logprobs else None
        self._texts: list[str] = []
        self._calls: list[ToolCall] = []
        self._call_id = self._name = ""
        self._arguments: list[str] = []
        self._reason: FinishReason = "length"
        self._stop_sequence = ""

    def add(self, piece: Piece) -> None:
        """Take the next piece."""
        self._texts.append(piece.text)
        if self._told is not None:
            self._told.extend(piece.logprobs)
        for event in piece.calls:
            if isinstance(event, CallBegun):
                self._call_id, self._name, self._arguments = event.call_id, event.name, []
            elif isinstance(event, CallArguments):
                self._arguments.append(event.json)
            else:
                self._end(event)
        if piece.finish_reason is not None:
            self._reason, self._stop_sequence = piece.finish_reason, piece.stop_sequence

    def choice(self) -> Choice:
        """Return what the pieces are together."""
        reason: FinishReason = "stop" if self._reason == "tool_calls" and not self._calls else self._reason
        told = None if self._told is None else tuple(self._told)
        return Choice("".join(self._texts), reason, tuple(self._calls), told, self._stop_sequence)

    def _end(self, event: CallEnded) -> None:
        arguments = "".join(self._arguments)
        try:
            msgspec.json.decode(arguments, type=dict)
        except (msgspec.DecodeError, RecursionError):
            self._texts.append(event.raw)
        else:
            self._calls.append(ToolCall(self._call_id, self._name, arguments))
