"""Which format this model's tool calls have, found in its chat template, or set; readers for its answers.

Ids of calls are made where the answer is read, so an answer that moves to another replica keeps them.
"""

from __future__ import annotations

from collections.abc import Callable

from serve_app.api.tool_calls import ToolUse
from serve_app.errors import InvalidRequest
from serve_app.generation.answer import SplitPiece
from serve_app.generation.tool_calls.formats import FORMATS, ToolFormat, check_format, find_format, json_list
from serve_app.generation.tool_calls.pieces import SplitCalls
from serve_app.generation.tool_calls.reader import CallReader
from serve_app.tokenization.tokenizer import PromptTokenizer


class ToolCalls:
    """What requests with tools need of one model. ``reads_tools``: whether its chat template shows it the tools."""

    def __init__(self, format_name: str | None, *, reads_tools: bool) -> None:
        self._format = None if format_name is None else FORMATS[format_name]
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
        if self._format is None and not use.must_call:
            raise InvalidRequest(
                "The format of this model's tool calls is not known; the setting tool_parser names it, "
                f"one of {', '.join(FORMATS)}.",
                param="tools",
            )

    def shown_tokens(self, use: ToolUse) -> frozenset[str]:
        """Return the special tokens that belong to an answer's text."""
        written = self._format_of(use)
        return frozenset() if written is None else written.shown

    def splitter(self, use: ToolUse) -> Callable[[], SplitPiece] | None:
        """Return what makes the reader of one choice's calls; None where answers are text alone."""
        written = self._format_of(use)
        if written is None:
            return None
        return lambda: SplitCalls(CallReader(written.grammar, written.make_id, use.names), parallel=use.parallel)

    def _format_of(self, use: ToolUse) -> ToolFormat | None:
        if not use or not use.may_call:
            return None
        if use.must_call:
            return ToolFormat(json_list, make_id=self._format.make_id) if self._format else ToolFormat(json_list)
        return self._format


def tool_calls_of(tokenizer: PromptTokenizer, parser: str) -> ToolCalls:
    """Return what requests with tools need of a tokenizer's model. Raises ValueError for a parser that is none."""
    check_format(parser)
    template = tokenizer.template
    found = find_format(template.source, tokenizer.special_tokens) if parser == "auto" else parser
    return ToolCalls(found, reads_tools=template.reads_tools)
