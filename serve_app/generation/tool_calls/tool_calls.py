"""Which format this model's tool calls have, found in its chat template, or set; readers for its answers.

Owns the ids of calls. They are made where the answer is read, so an answer that moves to another replica keeps them.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from serve_app.api.tool_calls import ToolUse
from serve_app.errors import InvalidRequest
from serve_app.generation.answer import Pieces
from serve_app.generation.tool_calls import grammars
from serve_app.generation.tool_calls.grammars import Grammar
from serve_app.generation.tool_calls.json_call import MakeId
from serve_app.generation.tool_calls.pieces import pieces_with_calls
from serve_app.generation.tool_calls.reader import CallReader
from serve_app.tokenization.tokenizer import PromptTokenizer

ParserName = Literal["hermes", "llama3_json", "mistral"]

_ALPHANUMERICS = string.ascii_letters + string.digits


def _call_id() -> str:
    return "call_" + secrets.token_hex(12)


def _mistral_id() -> str:
    """Return nine characters: Mistral's templates refuse other ids. Source: mistral-common."""
    return "".join(secrets.choice(_ALPHANUMERICS) for _ in range(9))


@dataclass(frozen=True, slots=True)
class ToolParser:
    """One family's format. ``shown``: special tokens that its text needs."""

    grammar: Grammar
    shown: frozenset[str]
    make_id: MakeId = _call_id


PARSERS: dict[ParserName, ToolParser] = {
    "hermes": ToolParser(grammars.hermes, frozenset({grammars.HERMES_OPENS, grammars.HERMES_CLOSES})),
    "llama3_json": ToolParser(grammars.llama3_json, frozenset({grammars.LLAMA3_OPENS})),
    "mistral": ToolParser(
        grammars.mistral,
        frozenset({grammars.MISTRAL_OPENS, grammars.MISTRAL_ID, grammars.MISTRAL_ARGUMENTS}),
        _mistral_id,
    ),
}


def find_parser(template: str, special_tokens: frozenset[str]) -> ParserName | None:
    """Return the format that a chat template asks its model to write, None where it is none of these.

    ``special_tokens``: the tokenizer's. XML in ``<tool_call>`` (``<function=name>``) is another format.
    """
    if grammars.HERMES_OPENS in template:
        return None if "<function=" in template else "hermes"
    if grammars.MISTRAL_OPENS in template or grammars.MISTRAL_OPENS in special_tokens:
        return "mistral"
    if '"parameters"' in template and (grammars.LLAMA3_OPENS in special_tokens or "python_tag" in template):
        return "llama3_json"
    return None


class ToolCalls:
    """What requests with tools need of one model. ``reads_tools``: whether its chat template shows it the tools."""

    def __init__(self, parser: ParserName | None, *, reads_tools: bool) -> None:
        self._parser = None if parser is None else PARSERS[parser]
        self._reads_tools = reads_tools

    def check(self, use: ToolUse) -> None:
        """Raise InvalidRequest for what this model cannot do."""
        if not use or not use.may_call:
            return
        if not self._reads_tools:
            raise InvalidRequest(
                "This model's chat template ignores tools; use a model whose template has them, or tool_choice none.",
                param="tools",
            )
        if self._parser is None and not use.must_call:
            raise InvalidRequest(
                "The format of this model's tool calls is not known; the setting tool_parser names it, "
                f"one of {', '.join(PARSERS)}.",
                param="tools",
            )

    def shown_tokens(self, use: ToolUse) -> frozenset[str]:
        """Return the special tokens that belong to an answer's text."""
        parser = self._parser_of(use)
        return frozenset() if parser is None else parser.shown

    def reading(self, use: ToolUse) -> Callable[[Pieces], Pieces]:
        """Return what reads the calls out of a choice's pieces; nothing does where answers are text alone."""
        parser = self._parser_of(use)
        if parser is None:
            return lambda pieces: pieces

        def read(pieces: Pieces) -> Pieces:
            reader = CallReader(parser.grammar, parser.make_id, use.names)
            return pieces_with_calls(pieces, reader, parallel=use.parallel)

        return read

    def _parser_of(self, use: ToolUse) -> ToolParser | None:
        if not use or not use.may_call:
            return None
        if use.must_call:
            return ToolParser(
                grammars.json_list, frozenset(), _call_id if self._parser is None else self._parser.make_id
            )
        return self._parser


def tool_calls_of(tokenizer: PromptTokenizer, parser: ParserName | Literal["auto"]) -> ToolCalls:
    """Return what requests with tools need of a tokenizer's model."""
    template = tokenizer.template
    found = find_parser(template.source, tokenizer.special_tokens) if parser == "auto" else parser
    return ToolCalls(found, reads_tools=template.reads_tools)
