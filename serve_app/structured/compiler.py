"""Grammars become llguidance's, compiled for one tokenizer, with limits for hostile ones. Compiling is for threads."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from serve_app.structured.grammar import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""Between two parts of JSON: a model that likes it too much would write nothing else."""

_SEARCHED = 200
"""Parts of a schema that are tried to find the one that is wrong."""
_SEARCH_S = 0.2
"""How long that may take: parts can be as much work as the whole, and somebody else waits for the thread."""


class GrammarError(ValueError):
    """No answer can follow this grammar; the message says why in a clause."""


class GrammarCompiler:
    """Compiles grammars for one tokenizer (any thread). llguidance is imported, and the tokenizer read, at the first.

    ``path``: a checkpoint with a fast tokenizer. ``end_token_ids``: the ends of an answer, one at least.
    """

    def __init__(self, path: Path, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        self._path = path
        self._vocab_size = vocab_size
        self._end_token_ids = list(end_token_ids)
        self._lock = Lock()
        self._tokenizer: LLTokenizer | None = None

    def compile(self, text: str) -> LLMatcher:
        """Return a matcher that has read nothing, for a grammar in llguidance's own form. Raises GrammarError."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self._loaded(), text, log_level=0, limits=_limits())
        if not matcher.is_error():
            matcher.compute_bitmask()  # what its copies begin with is known then
        error = matcher.get_error() if matcher.is_error() else ""
        if error or (matcher.is_stopped() and not matcher.is_accepting()):
            raise GrammarError(_said(error))
        return matcher

    def place_of_error(self, schema: Mapping[str, Any], error: str) -> str:
        """Return the path of the innermost part found in time that alone has the same error, "" for the whole."""
        end_s = time.perf_counter() + _SEARCH_S
        definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        tried = 0
        path, parts = "", list(_parts(schema))
        while parts and tried < _SEARCHED and time.perf_counter() < end_s:
            (name, part), tried = parts.pop(0), tried + 1
            try:
                self.compile(json.dumps({"grammars": [{"json_schema": {**definitions, **part}}]}))
            except GrammarError as part_error:
                if str(part_error) == error:
                    path, parts = f"{path}.{name}" if path else name, list(_parts(part))
        return path

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
    """Return limits in llguidance's units: about 20 ms to begin with, 40 MB; time a token is ``AnswerMatcher``'s."""
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
    """Return a grammar in llguidance's own form, not checked. Raises GrammarError where there is none."""
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


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the schemas that are directly in a schema, with their paths."""
    named: list[tuple[str, Any]] = [(name, schema.get(name)) for name in ("items", "additionalProperties")]
    for keyword in ("properties", "patternProperties", "$defs", "definitions"):
        inner = schema.get(keyword)
        named += [(f"{keyword}.{name}", part) for name, part in inner.items()] if isinstance(inner, dict) else []
    for keyword in ("anyOf", "allOf", "oneOf", "prefixItems"):
        inner = schema.get(keyword)
        named += [(f"{keyword}[{i}]", part) for i, part in enumerate(inner)] if isinstance(inner, list) else []
    return ((path, part) for path, part in named if isinstance(part, dict))


def _said(error: str) -> str:
    """Return what llguidance says in one line, cut."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    if not lines or lines[0] in ("NoExtension", "NoExtensionBias"):
        return "nothing matches it"
    # A regular expression's error is shown in several lines, of which the last says what it is.
    reason = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    return reason[:200]
