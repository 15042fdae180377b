"""Answers of one model, read with the tool calls in their text, and made whole."""

from collections.abc import Callable, Iterator
from dataclasses import replace as with_fields
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from serve_app.api.format import Choice, FinishReason, ToldToken
from serve_app.api.request import GenerateRequest, ToolUse
from serve_app.api.tool_calls import CallArguments, CallBegun, CallEnded, CallEvent, ToolCall
from serve_app.errors import InvalidRequest
from serve_app.generation.answer import ChoiceReader, Piece
from serve_app.generation.generation import Generation
from serve_app.generation.tool_calls.formats import (
    FORMATS,
    Reading,
    ToolFormat,
    check_format,
    find_format,
    forced_calls,
    json_list,
)
from serve_app.generation.tool_calls.source import MakeId, Source
from serve_app.tokenization.tokenizer import PromptTokenizer

R = TypeVar("R", bound=GenerateRequest)


class AnswerReaders:
    """Makes what reads a model's answers. Raises ValueError for a ``parser``, the setting, that is none."""

    def __init__(self, tokenizer: PromptTokenizer, parser: str) -> None:
        check_format(parser)
        template = tokenizer.template
        found = find_format(template.source, tokenizer.special_tokens) if parser == "auto" else parser
        self._format = None if found is None else FORMATS[found]
        self._reads_tools = template.reads_tools
        self._tokenizer = tokenizer

    def checked(self, request: R) -> R:
        """Return a request, with the grammar of calls where it must call. Raises InvalidRequest where it cannot."""
        use = request.tool_use
        if not use or not use.may_call:
            return request
        if not self._reads_tools:
            raise InvalidRequest(
                "This model's chat template ignores tools; use a model whose template has them, or tool_choice none.",
                param="tools",
            )
        if use.must_call:
            return with_fields(request, grammar=forced_calls(use))
        if self._format is None:
            raise InvalidRequest(
                "The format of this model's tool calls is not known; the setting tool_parser names it, "
                f"one of {', '.join(FORMATS)}.",
                param="tools",
            )
        return request

    def of(self, request: GenerateRequest) -> Callable[[int, Generation], ChoiceReader]:
        """Return what makes the reader of each choice of a request."""
        use = request.tool_use
        written = self._format_of(use)
        shown: frozenset[str] = frozenset() if written is None else written.shown

        def reader(index: int, generation: Generation) -> ChoiceReader:
            decoder, include_stop = self._tokenizer.decoder(shown), request.include_stop_str_in_output
            split = None
            if written is not None:
                split = CallReader(written.grammar, written.make_id, use.names, parallel=use.parallel).split
            return ChoiceReader(index, generation, decoder, request.stop, split, include_stop=include_stop)

        return reader

    def _format_of(self, use: ToolUse) -> ToolFormat | None:
        if not use or not use.may_call:
            return None
        if use.must_call:
            return ToolFormat(json_list, make_id=self._format.make_id) if self._format else ToolFormat(json_list)
        return self._format


class CallReader:
    """Reads the tool calls of one choice. ``calls``: how many have begun.

    However the text is cut, texts and arguments concatenate to the same. White space before the first call is shown
    once text follows, or at the end without a call. Without ``parallel`` the choice ends with its first call.
    """

    def __init__(self, grammar: Reading, make_id: MakeId, names: frozenset[str], *, parallel: bool = True) -> None:
        self._source = Source()
        self._steps = grammar(self._source, make_id, names)
        self._parallel = parallel
        self._spaces = ""
        self._shown = False
        self.calls = 0

    def split(self, piece: Piece) -> list[Piece]:
        """Return a piece as one or several; in each the text comes first."""
        events = self.push(piece.text)
        reason: FinishReason | None = piece.finish_reason
        if reason is not None:
            events += self.flush()
        if not self._parallel:
            end = next((i for i, event in enumerate(events, 1) if isinstance(event, CallEnded)), None)
            if end is not None:
                events, reason = events[:end], "stop"
        if reason == "stop" and self.calls:
            reason = "tool_calls"
        (text, calls), *more = _in_order(events)
        pieces = [replace(piece, text=text, calls=calls, finish_reason=None, stop_sequence="")]
        pieces += (Piece(piece.index, text, calls=calls) for text, calls in more)
        pieces[-1] = replace(pieces[-1], finish_reason=reason, stop_sequence=piece.stop_sequence)
        return pieces

    def push(self, text: str) -> list[str | CallEvent]:
        """Return what text completes: texts to show and events, in order. The beginning of a call is held back."""
        self._source.push(text)
        found: list[str | CallEvent] = []
        for step in self._steps:
            if step is None:
                break
            if isinstance(step, str):
                found += self._text(step)
                continue
            if isinstance(step, CallBegun):
                self.calls += 1
                self._shown = True
            found.append(step)
        return found

    def flush(self) -> list[str | CallEvent]:
        """Return what was held back; the answer has ended."""
        self._source.ended = True
        found = self.push("")
        return found if self.calls or not self._spaces else [*found, self._spaces]

    def _text(self, text: str) -> list[str | CallEvent]:
        if not self._shown:
            text = self._spaces + text
            self._shown = not (text == "" or text.isspace())
            self._spaces = "" if self._shown else text
        return [text] if self._shown and text else []


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
