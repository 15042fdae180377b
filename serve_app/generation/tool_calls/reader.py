"""Read a model's answers with the tool calls in their text, and assemble complete ones."""

from collections.abc import Callable
from dataclasses import replace as with_fields
from typing import TypeVar

import msgspec

from serve_app.api.format import Choice, FinishReason, RankedPrompt, ToldToken
from serve_app.api.request import ChatRequest, CompletionRequest, GenerateRequest, ToolUse
from serve_app.api.tool_calls import CallArguments, CallBegun, CallEnded, CallEvent, ToolCall
from serve_app.errors import InvalidRequest
from serve_app.generation.answer import ChoiceReader, Piece, PromptTokens, SplitPiece, in_pieces
from serve_app.generation.generation import Generation
from serve_app.generation.reasoning import REASONING_TAGS, ReasoningReader, Tags, find_reasoning_tags, grammar_after
from serve_app.generation.tool_calls.allowed import AllowedCalls
from serve_app.generation.tool_calls.formats import FORMATS, Reading, ToolFormat, find_format, forced_calls, json_list
from serve_app.generation.tool_calls.source import MakeId, Source
from serve_app.generation.tool_calls.vllm_reader import VllmReader, check_parser
from serve_app.tokenization.tokenizer import PromptTokenizer

R = TypeVar("R", bound=GenerateRequest)

PROMPT_END_TOKENS = 64
"""Number of last prompt tokens, longer than a reasoning tag: they show whether the template has opened one."""


class AnswerReaders:
    """Makes the readers of a model's answers; ``parser``, ``reasoning``: their settings.

    Raises ValueError for an unknown parser, or one that does not fit the tokenizer.
    """

    def __init__(self, tokenizer: PromptTokenizer, parser: str, reasoning: str = "auto") -> None:
        check_parser("tool_parser", parser)
        check_parser("reasoning_parser", reasoning)
        template, special = tokenizer.template, tokenizer.special_tokens
        parser = find_format(template.source, special) or "" if parser == "auto" else parser
        reasoning = find_reasoning_tags(template.source, special) if reasoning == "auto" else reasoning
        self._format, self._tags = FORMATS.get(parser), REASONING_TAGS.get(reasoning)
        self._they_call = bool(parser) and self._format is None
        self._they_think = reasoning != "none" and self._tags is None
        self._theirs = None
        if self._they_call or self._they_think:
            from serve_app.engine.vllm.parsers import VllmParsers

            names = reasoning if self._they_think else "", parser if self._they_call else ""
            self._theirs = VllmParsers(tokenizer.pretrained, *names)
        self._reads_tools = template.reads_tools
        self._tokenizer = tokenizer

    @property
    def thinks(self) -> bool:
        """Whether the model's reasoning is separated from its answers."""
        return self._tags is not None or self._they_think

    def checked(self, request: R) -> R:
        """Return a request, with the grammar of calls if it must call. Raises InvalidRequest if it cannot."""
        use = request.tool_use
        if not use or not use.may_call:
            return request
        if not self._reads_tools:
            raise InvalidRequest(
                "This model's chat template ignores tools; use a model with a template for tools, or tool_choice none.",
                param="tools",
            )
        if use.must_call:
            return with_fields(request, grammar=forced_calls(use))
        if self._format is None and not self._they_call:
            raise InvalidRequest(
                "The format of this model's tool calls is not known; the setting tool_parser names it, "
                f"one of {', '.join(FORMATS)}.",
                param="tools",
            )
        return request

    def after_reasoning(self, request: GenerateRequest, generations: list[Generation]) -> list[Generation]:
        """Return generations with grammars that apply only after the model's reasoning."""
        tags = self._tags or (Tags(*self._theirs.tags) if self._theirs else None)
        if not tags or not all(tags[:2]) or not generations[0].grammar or not isinstance(request, ChatRequest):
            return generations
        prompt, continued = self._ends_of(request, generations[0])
        if prompt.rstrip().endswith(tags.end):
            return generations
        special, opened = self._tokenizer.special_ids(tags[:2]), tags.opened_by(prompt, continued)
        grammar = grammar_after(generations[0].grammar, tags, special, opened=opened)
        return [with_fields(generation, grammar=grammar) for generation in generations]

    def of(self, request: GenerateRequest) -> Callable[[int, Generation], ChoiceReader]:
        """Return a function that makes the reader of each choice of a request."""
        use, chat = request.tool_use, isinstance(request, ChatRequest)
        written, tags = self._format_of(use), self._tags if chat else None
        they_call = self._they_call and bool(use) and use.may_call and not use.must_call
        shown = frozenset().union(written.shown if written else (), tags[:2] if tags else ())
        theirs = self._theirs if chat and (self._they_think or they_call) else None
        if theirs is not None and theirs.shows_special:
            shown = self._tokenizer.special_tokens

        def reader(index: int, generation: Generation) -> ChoiceReader:
            decoder, include_stop = self._tokenizer.decoder(shown), request.include_stop_str_in_output
            split: SplitPiece | None = None
            if written is not None:
                split = CallReader(written.grammar, written.make_id, use.names, parallel=use.parallel)
            if theirs is not None and isinstance(request, ChatRequest):
                kwargs = {**request.thinking, **request.chat_template_kwargs}
                tools = use.tools if they_call else ()
                push = theirs.parser(generation.token_ids.tolist(), tools, kwargs, thinks=self._they_think)
                split = VllmReader(push, parallel=use.parallel, rest=split)
            if split is not None and use.allowed and not use.must_call:
                split = AllowedCalls(split, use.allowed)
            if tags is not None and isinstance(request, ChatRequest):
                split = ReasoningReader(tags, opened=tags.opened_by(*self._ends_of(request, generation)), rest=split)
            prompt = self._prompt_tokens(request, generation) if request.told_prompt is not None else None
            return ChoiceReader(
                index, generation, decoder, request.stop, split, include_stop=include_stop, prompt=prompt
            )

        return reader

    def _prompt_tokens(self, request: GenerateRequest, generation: Generation) -> PromptTokens:
        """Return the collector of what a request wants to know about its prompt's tokens."""
        return PromptTokens(
            generation.token_ids.tolist(),
            self._tokenizer.texts,
            echo_tops=request.told_echo if isinstance(request, CompletionRequest) else None,
            tops=request.prompt_logprobs,
            chars=len(generation.echo),
        )

    def _ends_of(self, request: ChatRequest, generation: Generation) -> tuple[str, str]:
        """Return the end of a prompt's text, and the text of the answer that it continues, "" for none."""
        continued = str(request.messages[-1]["content"]) if request.continue_final_message else ""
        return self._tokenizer.text_of(generation.token_ids[-PROMPT_END_TOKENS:].tolist()), continued

    def _format_of(self, use: ToolUse) -> ToolFormat | None:
        if not use or not use.may_call:
            return None
        if use.must_call:
            return ToolFormat(json_list, make_id=self._format.make_id) if self._format else ToolFormat(json_list)
        return self._format


class CallReader:
    """Reads the tool calls of one choice. ``calls``: how many have begun.

    Texts and arguments concatenate to the same result for any division of the text. White space before the first call
    is shown once text follows, or at the end without a call. Without ``parallel`` the choice ends with its first call.
    """

    by_token = False

    def __init__(self, grammar: Reading, make_id: MakeId, names: frozenset[str], *, parallel: bool = True) -> None:
        self._source = Source()
        self._steps = grammar(self._source, make_id, names)
        self._parallel = parallel
        self._spaces = ""
        self._shown = False
        self.calls = 0

    def split(self, piece: Piece) -> list[Piece]:
        """Split a piece into one or several; in each the text comes first."""
        events = self.push(piece.text)
        if piece.finish_reason is not None:
            events += self.flush()
        return in_pieces(piece, events, called=self.calls > 0, parallel=self._parallel)

    def push(self, text: str) -> list[str | CallEvent]:
        """Return the texts and events that ``text`` completes, in order; the beginning of a call is held back."""
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
        """Return the text held back; the answer has ended."""
        self._source.ended = True
        found = self.push("")
        return found if self.calls or not self._spaces else [*found, self._spaces]

    def _text(self, text: str) -> list[str | CallEvent]:
        if not self._shown:
            text = self._spaces + text
            self._shown = not (text == "" or text.isspace())
            self._spaces = "" if self._shown else text
        return [text] if self._shown and text else []


class WholeChoice:
    """Gathers the pieces of one choice. A call becomes text if its arguments are not a JSON object."""

    def __init__(self, *, tells_logprobs: bool = False) -> None:
        self._told: list[ToldToken] | None = [] if tells_logprobs else None
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._call_id = self._name = ""
        self._arguments: list[str] = []
        self._reason: FinishReason = "length"
        self._stop_sequence = ""
        self._prompt: RankedPrompt | None = None

    def add(self, piece: Piece) -> None:
        """Add the next piece."""
        self._texts.append(piece.text)
        self._prompt = piece.prompt if piece.prompt is not None else self._prompt
        self._reasoning.append(piece.reasoning)
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
        """Return the choice that the pieces form together."""
        reason: FinishReason = "stop" if self._reason == "tool_calls" and not self._calls else self._reason
        told = None if self._told is None else tuple(self._told)
        text, reasoning = "".join(self._texts), "".join(self._reasoning)
        return Choice(text, reason, tuple(self._calls), told, self._stop_sequence, reasoning, self._prompt)

    def _end(self, event: CallEnded) -> None:
        arguments = "".join(self._arguments)
        try:
            msgspec.json.decode(arguments, type=dict)
        except (msgspec.DecodeError, RecursionError):
            self._texts.append(event.raw)
        else:
            self._calls.append(ToolCall(self._call_id, self._name, arguments))
