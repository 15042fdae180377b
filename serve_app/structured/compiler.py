"""Compiles grammars for one tokenizer with llguidance, with limits for hostile grammars. Compile in worker threads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from serve_app.structured.grammar import Grammar
from serve_app.structured.schema import Followable, Level, followable

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from llguidance._lib import JsonCompileOptions

_LAYOUT: JsonCompileOptions = {
    "whitespace_flexible": False,
    "whitespace_pattern": None,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""JSON has one layout, because some models would write white space for ever."""
_MAX_TRIES = 256
"""The maximum parts of one schema that are compiled, to find the wrong one."""
_COSTLY = (
    "patternProperties", "minProperties", "maxProperties", "pattern", "required", "minItems", "additionalProperties",
    "anyOf", "oneOf", "$ref",
)  # fmt: skip
"""Keywords that make a whole schema impossible to follow though each part is possible."""
_PROBES, _PROBE_TOKENS = 4, 32
"""The answers that are tried before a grammar is accepted, and the tokens of each."""


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

    def checked(self, grammar: Grammar) -> tuple[str, tuple[str, ...]]:
        """Return a grammar in llguidance's form, and the constraints that it leaves out. Raises GrammarError.

        Answers are tried, so that a grammar whose work exceeds the limits fails here, and not in an answer.
        """
        if grammar.kind != "json":
            form = llguidance_form(grammar)
            self._try(form)
            return form, ()
        schema, tries = json.loads(grammar.text), iter(range(_MAX_TRIES))
        try:
            return self._followed(schema, grammar, tries)
        except GrammarError:
            loose = [tool for tool in grammar.tools if not tool.strict]
            if not loose:
                raise
        free: dict[str, Any] = {"type": "object"}
        wrong: dict[str, str] = {}
        for tool in loose:
            try:
                self._followed(_with(schema, {each.path: free for each in loose if each is not tool}), grammar, tries)
            except GrammarError as error:
                wrong[tool.path] = (
                    f"tool {tool.name}: any arguments, because {str(error).removeprefix(f'tool {tool.name}: ')}"
                )
        form, left_out = self._followed(_with(schema, dict.fromkeys(wrong, free)), grammar, tries)
        return form, (*wrong.values(), *left_out)

    def _followed(self, schema: Any, grammar: Grammar, tries: Iterator[int]) -> tuple[str, tuple[str, ...]]:
        """Do as ``checked``, without loosening tools further. ``tries``: see ``_MAX_TRIES``."""
        levels: dict[str, Level] = {tool.path: "strict" if tool.strict else "free" for tool in grammar.tools}
        found = followable(schema, "strict" if grammar.strict else "usual", levels)
        form = self._tried(found, grammar, tries)
        return form, tuple(_at(place.keyword, place.path, grammar) for place in found.left_out)

    def _tried(self, found: Followable, grammar: Grammar, tries: Iterator[int]) -> str:
        """Return the form of a schema that answers can follow. Raises GrammarError with the keyword and its place."""
        form = _json_form(found.schema, coerce_one_of=not any(each.keyword == "oneOf" for each in found.without_form))
        try:
            self._try(form)
        except GrammarError as error:
            for place in found.without_form:
                if re.search(rf"(?<!\w){re.escape(place.keyword)}\b", str(error)):
                    raise GrammarError(f"{_at(place.keyword, place.path, grammar)} is not supported") from error
            for (path, leaf), _ in zip(found.leaves.items(), tries, strict=False):
                if self._error(leaf) == str(error):
                    keyword = self._wrong(leaf, str(error))
                    raise GrammarError(f"{_at(keyword, path, grammar)}: {error}") from error
            if re.match("Resource|Pointer|Anchor|circular", str(error)):
                raise GrammarError(f"`$ref`: {error}") from error
            costly = [keyword for keyword in _COSTLY if _has(found.schema, keyword)]
            for keyword, _ in zip(costly, tries, strict=False):
                if not self._error(_without(found.schema, keyword)):
                    raise GrammarError(f"`{keyword}`: {error}") from error
            raise
        return form

    def _wrong(self, leaf: dict[str, Any], error: str) -> str:
        """Return the keyword that this error of a part of a schema is about."""
        without = ({name: value for name, value in leaf.items() if name != keyword} for keyword in leaf)
        return next((name for name, rest in zip(leaf, without, strict=True) if self._error(rest) != error), "type")

    def _error(self, schema: dict[str, Any]) -> str:
        """Return why no answer can follow a schema, "" if one can."""
        try:
            self._try(_json_form(schema))
        except GrammarError as error:
            return str(error)
        return ""

    def _try(self, form: str) -> None:
        """Compile a grammar and write some answers. Raises GrammarError."""
        matcher = self.compile(form)
        for probe in range(_PROBES):
            walk = matcher.deep_copy()
            for step in range(_PROBE_TOKENS):
                allowed = np.flatnonzero(
                    np.unpackbits(np.frombuffer(walk.compute_bitmask(), np.uint8), bitorder="little")
                )
                if not len(allowed) or walk.is_error():
                    break
                # The first token, the last one, and two in between that differ from step to step.
                at = (0, len(allowed) - 1, step * 7919, step * 104729 + 1)[probe] % len(allowed)
                if not walk.consume_token(int(allowed[at])) or walk.is_stopped():
                    break
            if walk.is_error():
                raise GrammarError(f"it takes too much work: {_said(walk.get_error())}")

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
                return _json_form(followable(json.loads(grammar.text)).schema)
            case "regex":
                return LLMatcher.grammar_from_regex(grammar.text)
            case "choice":
                strings: list[Any] = json.loads(grammar.text)
                return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, strings)))
            case "grammar":
                return grammar_from("grammar", grammar.text)
    except ValueError as error:
        raise GrammarError(_said(str(error))) from error


def _json_form(schema: Any, *, coerce_one_of: bool = False) -> str:
    """Return a schema's grammar in llguidance's own form. ``coerce_one_of``: a value may fit several alternatives."""
    from llguidance import LLMatcher

    if schema is False:
        raise GrammarError("nothing matches it, because a part that it requires is false or leads back to itself")
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), None, {**_LAYOUT, "coerce_one_of": coerce_one_of})
    except ValueError as error:
        raise GrammarError(_said(str(error))) from error


def _at(keyword: str, path: str, grammar: Grammar) -> str:
    """Return a keyword and its place, with the tool that has it."""
    for tool in grammar.tools:
        if path == tool.path or path.startswith(tool.path + "/"):
            return f"tool {tool.name}: `{keyword}` at #{path.removeprefix(tool.path)}"
    return f"`{keyword}` at {path}"


def _has(schema: Any, keyword: str) -> bool:
    parts = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    return (isinstance(schema, dict) and keyword in schema) or any(_has(part, keyword) for part in parts)


def _without(schema: Any, keyword: str) -> Any:
    """Return a schema without a keyword at any place."""
    if isinstance(schema, dict):
        return {name: _without(part, keyword) for name, part in schema.items() if name != keyword}
    return [_without(part, keyword) for part in schema] if isinstance(schema, list) else schema


def _with(schema: Any, parts: Mapping[str, Any], path: str = "#") -> Any:
    """Return a schema with other parts at these paths."""
    if path in parts:
        return parts[path]
    if isinstance(schema, dict):
        return {name: _with(part, parts, f"{path}/{name}") for name, part in schema.items()}
    if isinstance(schema, list):
        return [_with(part, parts, f"{path}/{index}") for index, part in enumerate(schema)]
    return schema


def _said(error: str) -> str:
    """Return llguidance's error as one shortened line."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    if not lines or lines[0] in ("NoExtension", "NoExtensionBias"):
        return "nothing matches it"
    # A regular expression's error has several lines, and the last one contains the reason.
    reason = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    return reason[:200]
