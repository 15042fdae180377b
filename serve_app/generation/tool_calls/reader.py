"""Read a model's answers, with the reasoning and the tool calls in their text."""

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace as with_fields
from typing import TYPE_CHECKING, TypeVar

from msgspec import structs

from serve_app.api.request import ChatRequest, CompletionRequest, GenerateRequest, Tool, ToolUse
from serve_app.engine.protocol import EngineRequest
from serve_app.errors import InvalidRequest
from serve_app.generation.answer import ChoiceReader, Gate, PromptTokens, SplitPiece
from serve_app.generation.reasoning import (
    REASONING_TAGS,
    ContentGate,
    ReasoningReader,
    Tags,
    find_reasoning_tags,
    grammar_after,
)
from serve_app.generation.rules import hidden_ends
from serve_app.generation.tool_calls.call_reader import AllowedCalls, CallReader
from serve_app.generation.tool_calls.formats import FORMATS, ToolFormat, call_id, forced_calls, json_list
from serve_app.generation.tool_calls.harmony import (
    MARKS,
    REASONING_PARSER,
    TOOL_PARSER,
    Harmony,
    HarmonyGate,
    HarmonyReader,
    harmony_grammar,
    writes_harmony,
)
from serve_app.generation.tool_calls.round_trip import MADE_UP, find_parser, reads_back
from serve_app.generation.tool_calls.source import MakeId
from serve_app.generation.tool_calls.vllm_reader import OTHERS, VllmGate, VllmReader, check_parser
from serve_app.tokenization.tokenizer import PromptTokenizer

if TYPE_CHECKING:
    from serve_app.engine.vllm.parsers import Push

R = TypeVar("R", bound=GenerateRequest)

PROMPT_END_TOKENS = 64
"""Number of last prompt tokens, longer than a reasoning tag: they show whether the template has opened one."""


class AnswerReaders:
    """Makes the readers of a model's answers; ``parser``, ``reasoning``, ``stop_in_reasoning``: settings.

    Raises ValueError for an unknown parser, or one that does not fit the tokenizer.
    """

    def __init__(
        self, tokenizer: PromptTokenizer, parser: str, reasoning: str = "auto", *, stop_in_reasoning: bool = False
    ) -> None:
        check_parser("tool_parser", parser)
        check_parser("reasoning_parser", reasoning)
        template, special = tokenizer.template, tokenizer.special_tokens
        self._reads_tools = template.reads_tools
        self._tokenizer = tokenizer
        self._stop_in_reasoning = stop_in_reasoning
        self._lacking = ""
        self._harmony: Harmony | None = None
        if parser == TOOL_PARSER or reasoning == REASONING_PARSER:
            self._harmony = Harmony(tokenizer)
        elif parser == "auto" and reasoning == "auto" and writes_harmony(template.source, special):
            try:
                harmony = Harmony(tokenizer)
            except ValueError as error:
                self._lacking = f"{error}."
            else:
                schemas = ToolUse(MADE_UP).schemas
                fits = reads_back(tokenizer, MARKS, lambda: HarmonyReader(harmony, schemas, lambda name: name))
                self._harmony = harmony if fits else None
        if self._harmony is not None:
            parser, reasoning = "", "none"
        elif template.tells_tools:
            parser = "hermes"  # as prompts tell the model, whatever the setting is
        elif parser == "auto":
            parser = find_parser(tokenizer) if self._reads_tools else ""
        reasoning = find_reasoning_tags(template.source, special) if reasoning == "auto" else reasoning
        self._format, self._tags = FORMATS.get(parser), REASONING_TAGS.get(reasoning)
        self._they_call = bool(parser) and self._format is None
        self._they_think = reasoning != "none" and self._tags is None
        self._theirs = None
        if self._they_call or self._they_think:
            from serve_app.engine.vllm.parsers import VllmParsers

            names = reasoning if self._they_think else "", parser if self._they_call else ""
            self._theirs = VllmParsers(tokenizer.pretrained, *names)

    @property
    def unread(self) -> str:
        """Why tool calls are not read although the model's template has tools, and what to set; "" if they are."""
        if not self._reads_tools or self._format is not None or self._they_call or self._harmony is not None:
            return ""
        return self._lacking or (
            "The format of this model's tool calls is not known: no reader reads back what its chat template writes. "
            f"The setting tool_parser names one of {', '.join(FORMATS)}{OTHERS}."
        )

    @property
    def thinks(self) -> bool:
        """Whether the model's reasoning is separated from its answers."""
        return self._tags is not None or self._they_think or self._harmony is not None

    def checked(self, request: R) -> R:
        """Return a request, with the grammar of calls if it must call. Raises InvalidRequest if it cannot."""
        use = request.tool_use
        if not use.tools or not use.may_call:
            return request
        if not self._reads_tools:
            raise InvalidRequest(
                "This model's chat template ignores tools; use a model with a template for tools, or tool_choice none.",
                param="tools",
            )
        if use.must_call:
            return with_fields(request, grammar=forced_calls(use))
        if self.unread:
            raise InvalidRequest(self.unread, param="tools")
        return request

    def after_reasoning(self, request: GenerateRequest, generations: list[EngineRequest]) -> list[EngineRequest]:
        """Return generations with grammars that apply only after the model's reasoning."""
        if self._harmony is not None and generations[0].grammar and isinstance(request, ChatRequest):
            if request.continue_final_message:
                return generations
            grammar = harmony_grammar(generations[0].grammar, self._harmony.special)
            return [structs.replace(generation, grammar=grammar) for generation in generations]
        tags = self._tags or (Tags(*self._theirs.tags) if self._theirs else None)
        if not tags or not all(tags[:2]) or not generations[0].grammar or not isinstance(request, ChatRequest):
            return generations
        prompt, continued = self._ends_of(request, generations[0])
        if prompt.rstrip().endswith(tags.end):
            return generations
        special, opened = self._tokenizer.ids_in_grammars(tags[:2]), tags.opened_by(prompt, continued)
        grammar = grammar_after(generations[0].grammar, tags, special, opened=opened)
        return [structs.replace(generation, grammar=grammar) for generation in generations]

    def of(self, request: GenerateRequest) -> Callable[[int, EngineRequest], ChoiceReader]:
        """Return a function that makes the reader of each choice of a request."""
        chat = request if isinstance(request, ChatRequest) else None
        tags = self._tags if chat is not None else None
        # Whether an answer may have more than text, besides the reasoning between ``tags``.
        parts = bool(request.tool_use.tools) or self._theirs is not None or self._harmony is not None
        visible = self._visible(request) if parts or tags is not None else ()

        def reader(index: int, generation: EngineRequest) -> ChoiceReader:
            decoder = self._tokenizer.decoder(visible)
            split = self._calls(request, generation) if parts else None
            gate: Gate | None = None
            if tags is not None and chat is not None:
                opened = tags.opened_by(*self._ends_of(chat, generation))
                inside = self._calls(chat, generation) if split is not None and not chat.tool_use.must_call else None
                split = thought = ReasoningReader(tags, opened=opened, rest=split, inside=inside)
                gate = ContentGate(tags, opened=opened, reader=thought)
            elif self._they_think and chat is not None and chat.stop:
                gate = VllmGate(self._push_of(chat, generation, ()))
            elif self._harmony is not None and chat is not None and chat.stop:
                gate = HarmonyGate(self._harmony, self._ends_of(chat, generation)[1])
            prompt = self._prompt_tokens(request, generation) if request.told_prompt is not None else None
            stops = generation.sampling.stop_token_ids
            hidden = hidden_ends(request, stops) if request.return_token_ids else ()
            return ChoiceReader(
                index,
                generation,
                decoder,
                request.stop,
                split,
                include_stop=request.include_stop_str_in_output,
                prompt=prompt,
                by_id=request.return_tokens_as_token_ids,
                gate=None if self._stop_in_reasoning else gate,
                hidden_ends=hidden,
            )

        return reader

    def _visible(self, request: GenerateRequest) -> Collection[str]:
        """Return the special tokens that the readers of an answer need in its text."""
        written, chat = self._format_of(request.tool_use), isinstance(request, ChatRequest)
        if self._harmony is not None and chat:
            return MARKS
        theirs = self._theirs if chat and (self._they_think or self._they_read_calls(request.tool_use)) else None
        if theirs is not None and theirs.shows_special:
            return self._tokenizer.special_tokens
        return (*(written.shown if written else ()), *(self._tags[:2] if self._tags and chat else ()))

    def _they_read_calls(self, use: ToolUse) -> bool:
        return self._they_call and bool(use.tools) and use.may_call and not use.must_call

    def _calls(self, request: GenerateRequest, generation: EngineRequest) -> SplitPiece | None:
        """Return the reader of the calls in an answer, and of the reasoning that a parser of both reads."""
        use, written = request.tool_use, self._format_of(request.tool_use)
        split: SplitPiece | None = None
        if written is not None:
            make_id, parallel, forced = ids_of(written, request), use.parallel, use.must_call
            split = CallReader(written.reading, make_id, use.schemas, parallel=parallel, forced=forced)
        if self._theirs is not None and isinstance(request, ChatRequest):
            they_call = self._they_read_calls(use)
            if self._they_think or they_call:
                push = self._push_of(request, generation, use.tools if they_call else ())
                split = VllmReader(push, parallel=use.parallel, rest=split)
        if self._harmony is not None and isinstance(request, ChatRequest):
            split = HarmonyReader(
                self._harmony,
                use.schemas if use.may_call and not use.must_call else {},
                lambda name: call_id(name, 0),
                continued=self._ends_of(request, generation)[1],
                parallel=use.parallel,
                rest=split,
            )
        if split is not None and use.allowed and not use.must_call:
            split = AllowedCalls(split, use.allowed)
        return split

    def _push_of(self, request: ChatRequest, generation: EngineRequest, tools: Sequence[Tool]) -> "Push":
        """Return the function of vLLM's parser that reads an answer. ``tools``: none if calls are not read."""
        assert self._theirs is not None
        kwargs = {**request.thinking, **request.chat_template_kwargs}
        return self._theirs.parser(generation.token_ids.tolist(), tools, kwargs, thinks=self._they_think)

    def _prompt_tokens(self, request: GenerateRequest, generation: EngineRequest) -> PromptTokens:
        """Return the collector of what a request wants to know about its prompt's tokens."""
        return PromptTokens(
            generation.token_ids.tolist(),
            self._tokenizer.texts,
            echo_tops=request.told_echo if isinstance(request, CompletionRequest) else None,
            tops=request.prompt_logprobs,
            chars=len(generation.echo),
            by_id=request.return_tokens_as_token_ids,
        )

    def _ends_of(self, request: ChatRequest, generation: EngineRequest) -> tuple[str, str]:
        """Return the end of a prompt's text, and the text of the answer that it continues, "" for none."""
        continued = str(request.messages[-1]["content"]) if request.continue_final_message else ""
        return self._tokenizer.text_of(generation.token_ids[-PROMPT_END_TOKENS:].tolist()), continued

    def _format_of(self, use: ToolUse) -> ToolFormat | None:
        if not use.tools or not use.may_call:
            return None
        if use.must_call:
            return ToolFormat(json_list, make_id=self._format.make_id) if self._format else ToolFormat(json_list)
        return self._format


def ids_of(written: ToolFormat, request: GenerateRequest) -> MakeId:
    """Return a function that makes the ids of an answer's calls; it knows how many calls the conversation has."""
    messages = request.messages if isinstance(request, ChatRequest) else ()
    numbers = itertools.count(sum(len(message.get("tool_calls") or ()) for message in messages))
    return lambda name: written.make_id(name, next(numbers))
