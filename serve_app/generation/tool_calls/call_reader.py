"""Split the calls off one choice's text, and assemble whole choices.

The model sees more tools than a request may allow, so that their prompt stays the same: ``AllowedCalls``.
"""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from serve_app.api.format import (
    ApiFinishReason,
    CallArguments,
    CallBegun,
    CallEnded,
    CallEvent,
    Choice,
    RankedPrompt,
    ToldToken,
    ToolCall,
    are_whole,
)
from serve_app.generation.answer import Piece, SplitPiece, in_pieces
from serve_app.generation.tool_calls.formats import Reading
from serve_app.generation.tool_calls.source import MakeId, Source


class CallReader:
    """Reads the tool calls of one choice. ``calls``: how many have begun.

    Texts and arguments concatenate to the same result for any division of the text. White space before the first call
    is shown once text follows, or at the end without a call. Without ``parallel`` the choice ends with its first call.
    ``forced``: the answer consists of calls alone, so an end within one is a cut.
    """

    by_token = False

    def __init__(
        self,
        reading: Reading,
        make_id: MakeId,
        tools: Mapping[str, Any],
        *,
        parallel: bool = True,
        forced: bool = False,
    ) -> None:
        self._source = Source()
        self._forced = forced
        self._steps = reading(self._source, make_id, tools)
        self._parallel = parallel
        self._spaces = ""
        self._has_text = False
        self.calls = 0

    def split(self, piece: Piece) -> list[Piece]:
        """Split a piece into one or several; in each the text comes first."""
        events = self.push(piece.text)
        if piece.finish_reason is not None:
            cut = self._forced or piece.finish_reason == "length" or bool(piece.stop_sequence)
            events += self.flush(cut=cut)
        return in_pieces(piece, events, called=self.calls > 0, parallel=self._parallel)

    def push(self, text: str) -> list[str | CallEvent]:
        """Return the texts and events that ``text`` completes, in order; the beginning of a call is held back."""
        self._source.push(text)
        events: list[str | CallEvent] = []
        for step in self._steps:
            if step is None:
                break
            if isinstance(step, str):
                events += self._text(step)
                continue
            if isinstance(step, CallBegun):
                self.calls += 1
                self._has_text = True
            events.append(step)
        return events

    def flush(self, *, cut: bool = False) -> list[str | CallEvent]:
        """Return the text held back; the answer has ended. ``cut``: not by the model."""
        self._source.ended, self._source.cut = True, cut
        events = self.push("")
        return events if self.calls or not self._spaces else [*events, self._spaces]

    def _text(self, text: str) -> list[str | CallEvent]:
        if not self._has_text:
            text = self._spaces + text
            self._has_text = not (text == "" or text.isspace())
            self._spaces = "" if self._has_text else text
        return [text] if self._has_text and text else []


class WholeChoice:
    """Gathers the pieces of one choice. A call that was not cut is text if its arguments are not a JSON object."""

    def __init__(self, *, tells_logprobs: bool = False) -> None:
        self._logprobs: list[ToldToken] | None = [] if tells_logprobs else None
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._call_id = self._name = ""
        self._arguments: list[str] = []
        self._reason: ApiFinishReason = "length"
        self._stop_sequence = ""
        self._prompt: RankedPrompt | None = None
        self._token_ids: list[int] = []

    def add(self, piece: Piece) -> None:
        """Add the next piece."""
        self._texts.append(piece.text)
        self._token_ids += piece.token_ids
        self._prompt = piece.prompt if piece.prompt is not None else self._prompt
        self._reasoning.append(piece.reasoning)
        if self._logprobs is not None:
            self._logprobs.extend(piece.logprobs)
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
        """Return the choice that the pieces form together."""
        reason: ApiFinishReason = "stop" if self._reason == "tool_calls" and not self._calls else self._reason
        logprobs = None if self._logprobs is None else tuple(self._logprobs)
        text, reasoning = "".join(self._texts), "".join(self._reasoning)
        calls, token_ids = tuple(self._calls), tuple(self._token_ids)
        return Choice(text, reason, calls, logprobs, self._stop_sequence, reasoning, self._prompt, token_ids)

    def _end(self, event: CallEnded) -> None:
        arguments = "".join(self._arguments)
        whole = are_whole(arguments)
        if whole or event.cut:
            self._calls.append(ToolCall(self._call_id, self._name, arguments, cut=not whole))
        else:
            self._texts.append(event.raw)


class AllowedCalls:
    """Lets through the calls that ``inner`` reads of the tools ``names``; it shows those of others as text."""

    def __init__(self, inner: SplitPiece, names: frozenset[str]) -> None:
        self._inner = inner
        self._names = names
        self._called = False
        self._refused: str | None = None  # the text of the open call of another tool

    @property
    def by_token(self) -> bool:
        """Whether each next piece must hold a single token."""
        return self._inner.by_token

    def split(self, piece: Piece) -> list[Piece]:
        """Split a piece into one or several; in each the text comes first."""
        return [part for read in self._inner.split(piece) for part in self._allowed_parts(read)]

    def _allowed_parts(self, piece: Piece) -> list[Piece]:
        if not piece.calls and self._refused is None and piece.finish_reason != "tool_calls":
            return [piece]
        events: list[str | CallEvent] = [piece.text] if piece.text else []
        for event in piece.calls:
            events += self._event(event)
        if piece.finish_reason is not None and self._refused is not None:
            events.append(self._refused)
        reason = "stop" if piece.finish_reason == "tool_calls" else piece.finish_reason
        return in_pieces(replace(piece, finish_reason=reason), events, called=self._called, parallel=True)

    def _event(self, event: CallEvent) -> list[str | CallEvent]:
        if isinstance(event, CallBegun):
            if event.name in self._names:
                self._called = True
                return [event]
            self._refused = event.name
        elif self._refused is None:
            return [event]
        elif isinstance(event, CallArguments):
            self._refused += event.json
        elif isinstance(event, CallEnded):
            text, self._refused = self._refused, None
            return [max(event.raw, text, key=len)]  # some readers keep no more of a call than its arguments
        return []
