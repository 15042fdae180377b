"""Compiles grammars for one tokenizer with llguidance, with limits for hostile grammars. Compile in worker threads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from serve_app.structured.grammar import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""The whitespace between two parts of JSON. It is bounded because some models would write nothing else."""


class GrammarError(ValueError):
    """No answer can follow this grammar. The message contains the reason as a clause."""


class GrammarCompiler:
    """Compiles grammars for one tokenizer (any thread). The first call imports llguidance and reads the tokenizer.

    ``path``: a checkpoint with a fast tokenizer. ``end_token_ids``: the tokens that end an answer, at least one.
    """

    def __init__(self, path: Path, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        self._path = path
        self._vocab_size = vocab_size
        self._end_token_ids = list(end_token_ids)
        self._lock = Lock()
        self._tokenizer: LLTokenizer | None = None

    def compile(self, text: str) -> LLMatcher:
        """Return a fresh matcher for a grammar in llguidance's own form. Raises GrammarError."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self._loaded(), text, log_level=0, limits=_limits())
        if not matcher.is_error():
            matcher.compute_bitmask()  # precomputes the initial state of its copies
        error = matcher.get_error() if matcher.is_error() else ""
        if error or (matcher.is_stopped() and not matcher.is_accepting()):
            raise GrammarError(_said(error))
        return matcher

    def _loaded(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        with self._lock:
            if self._tokenizer is None:
                from transformers import AutoTokenizer

                loaded = AutoTokenizer.from_pretrained(self._path, local_files_only=True, trust_remote_code=False)
                backend: Any = loaded.backend_tokenizer
                backend.no_truncation()
                backend.no_padding()
                ids = max(self._vocab_size, *(i + 1 for i in backend.get_vocab(with_added_tokens=True).values()))
                self._tokenizer = LLTokenizer(backend.to_str(), n_vocab=ids, eos_token=self._end_token_ids)
            return self._tokenizer


def _limits() -> LLParserLimits:
    """Return limits in llguidance's units: about 20 ms at the start, 40 MB. ``AnswerMatcher`` limits time per token."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_grammar_size=100_000,
        max_items_in_row=1_000,
        initial_lexer_fuel=1_000_000,
        max_lexer_states=20_000,
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


def llguidance_form(grammar: Grammar) -> str:
    """Return a grammar in llguidance's own form, unchecked. Raises GrammarError if it cannot be converted."""
    from llguidance import LLMatcher, grammar_from

    try:
        match grammar.kind:
            case "json":
                return LLMatcher.grammar_from_json_schema(grammar.text, {"whitespace_pattern": _WHITESPACE})
            case "regex":
                return LLMatcher.grammar_from_regex(grammar.text)
            case "choice":
                strings: list[Any] = json.loads(grammar.text)
                return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, strings)))
            case "grammar":
                return grammar_from("grammar", grammar.text)
    except ValueError as error:
        raise GrammarError(_said(str(error))) from error


def _said(error: str) -> str:
    """Return llguidance's error as one shortened line."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    if not lines or lines[0] in ("NoExtension", "NoExtensionBias"):
        return "nothing matches it"
    # A regular expression's error has several lines, and the last one contains the reason.
    reason = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    return reason[:200]
