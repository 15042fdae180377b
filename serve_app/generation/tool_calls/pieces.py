"""Pieces of an answer, with the tool calls read out of their text; and a whole choice made of them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from serve_app.api.format import Choice, FinishReason, ToldToken
from serve_app.api.tool_calls import CallArguments, CallBegun, CallEnded, CallEvent, ToolCall
from serve_app.generation.answer import Piece
from serve_app.generation.tool_calls.reader import CallReader


class SplitCalls:
    """Takes the calls out of one choice's pieces; in each piece the text comes first.

    Without ``parallel`` the choice ends with its first call.
    """

    def __init__(self, reader: CallReader, *, parallel: bool) -> None:
        self._reader = reader
        self._parallel = parallel

    def __call__(self, piece: Piece) -> list[Piece]:
        """Return a piece as one or several."""
        events = self._reader.push(piece.text)
        reason: FinishReason | None = piece.finish_reason
        if reason is not None:
            events += self._reader.flush()
        if not self._parallel:
            end = next((i for i, event in enumerate(events, 1) if isinstance(event, CallEnded)), None)
            if end is not None:
                events, reason = events[:end], "stop"
        if reason == "stop" and self._reader.calls:
            reason = "tool_calls"
        (text, calls), *more = _in_order(events)
        pieces = [replace(piece, text=text, calls=calls, finish_reason=None, stop_sequence="")]
        pieces += (Piece(piece.index, text, calls=calls) for text, calls in more)
        pieces[-1] = replace(pieces[-1], finish_reason=reason, stop_sequence=piece.stop_sequence)
        return pieces


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
