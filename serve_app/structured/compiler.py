"""Compiles grammars for one tokenizer with llguidance, with limits for hostile grammars. Compile in worker threads."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from serve_app.fairness.work import StepBudget, TooMuchWorkError, check_wanted
from serve_app.structured.grammar import Grammar
from serve_app.structured.schema import MAX_STEPS, Followable, Level, followable

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
_MAX_TRIED_S = 1.0
"""CPU time to find the wrong part of a grammar, to loosen tools, and to try answers. Honest ones need 0.1 s."""
_COSTLY = (
    "patternProperties", "minProperties", "maxProperties", "pattern", "required", "minItems", "additionalProperties",
    "anyOf", "oneOf", "$ref",
)  # fmt: skip
"""Keywords that make a whole schema impossible to follow though each part is possible."""
_PROBES, _PROBE_TOKENS = 4, 32
"""The answers that are tried before a grammar is accepted, and the tokens of each."""


_LARK = re.compile(r"^[^\S\n]*+(?:%llguidance\b|start\s*+:)", re.MULTILINE)
"""What tells Lark's grammars from GBNF's. llguidance's own pattern looks over all following lines from each line."""


class GrammarError(ValueError):
    """No answer can follow this grammar. The message contains the reason as a clause."""


class Vocabulary(NamedTuple):
    """A tokenizer as JSON, and the number of its ids."""

    tokenizer: str
    ids: int


class _Allowance:
    """What one grammar may still cost. ``clock``: CPU seconds of this thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until_s = clock() + _MAX_TRIED_S
        self._tries = _MAX_TRIES
        self.steps = StepBudget(MAX_STEPS)

    def more(self) -> bool:
        """Return whether another part may be compiled. Raises AbandonedError."""
        self._tries -= 1
        return self._tries >= 0 and self.lasts()

    def lasts(self) -> bool:
        """Return whether there is time left. Raises AbandonedError."""
        check_wanted()
        return self._clock() < self._until_s


class GrammarCompiler:
    """Compiles grammars for one tokenizer (any thread). The first call imports llguidance and reads the tokenizer.

    ``path``: a checkpoint with a fast tokenizer. ``end_token_ids``: the tokens that end an answer, at least one.
    ``clock``: CPU seconds of the calling thread. ``vocabulary``: in place of the checkpoint's.
    """

    def __init__(
        self,
        path: Path,
        vocab_size: int,
        end_token_ids: Sequence[int],
        clock: Callable[[], float] = time.thread_time,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self._clock = clock
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
        left = _Allowance(self._clock)
        if grammar.kind != "json":
            form = llguidance_form(grammar)
            self._try(form, left)
            return form, ()
        schema = json.loads(grammar.text)
        try:
            return self._followed(schema, grammar, left)
        except GrammarError:
            loose = [tool for tool in grammar.tools if not tool.strict]
            if not loose:
                raise
        free: dict[str, Any] = {"type": "object"}
        wrong: dict[str, str] = {}
        for tool in loose:
            try:
                if not left.lasts():
                    raise GrammarError("it takes too long to check")
                self._followed(_with(schema, {each.path: free for each in loose if each is not tool}), grammar, left)
            except GrammarError as error:
                wrong[tool.path] = (
                    f"tool {tool.name}: any arguments, because {str(error).removeprefix(f'tool {tool.name}: ')}"
                )
        form, left_out = self._followed(_with(schema, dict.fromkeys(wrong, free)), grammar, left)
        return form, (*wrong.values(), *left_out)

    def _followed(self, schema: Any, grammar: Grammar, left: _Allowance) -> tuple[str, tuple[str, ...]]:
        """Do as ``checked``, without loosening tools further."""
        levels: dict[str, Level] = {tool.path: "strict" if tool.strict else "free" for tool in grammar.tools}
        try:
            found = followable(schema, "strict" if grammar.strict else "usual", levels, left.steps)
        except TooMuchWorkError:
            raise GrammarError("it takes too much work: make it smaller, or refer to fewer parts") from None
        form = self._tried(found, grammar, left)
        return form, tuple(_at(place.keyword, place.path, grammar) for place in found.left_out)

    def _tried(self, found: Followable, grammar: Grammar, left: _Allowance) -> str:
        """Return the form of a schema that answers can follow. Raises GrammarError with the keyword and its place."""
        form = _json_form(found.schema, coerce_one_of=not any(each.keyword == "oneOf" for each in found.without_form))
        try:
            self._try(form, left)
        except GrammarError as error:
            said = str(error)
            for place in found.without_form:
                if re.search(rf"(?<!\w){re.escape(place.keyword)}\b", said):
                    raise GrammarError(f"{_at(place.keyword, place.path, grammar)} is not supported") from error
            for path, leaf in found.leaves.items():
                if not left.more():
                    break
                if self._error(leaf, left) == said:
                    keyword = self._wrong(leaf, said, left)
                    raise GrammarError(f"{_at(keyword, path, grammar)}: {error}") from error
            if re.match("Resource|Pointer|Anchor|circular", said):
                raise GrammarError(f"`$ref`: {error}") from error
            for keyword in _COSTLY:
                if not _has(found.schema, keyword):
                    continue
                if not left.more():
                    break
                if not self._error(_without(found.schema, keyword), left):
                    raise GrammarError(f"`{keyword}`: {error}") from error
            raise
        return form

    def _wrong(self, leaf: dict[str, Any], said: str, left: _Allowance) -> str:
        """Return the keyword that this error of a part of a schema is about, "type" if it is not found."""
        for keyword in leaf:
            if not left.more():
                break
            rest = {name: value for name, value in leaf.items() if name != keyword}
            if self._error(rest, left) != said:
                return keyword
        return "type"

    def _error(self, schema: dict[str, Any], left: _Allowance) -> str:
        """Return why no answer can follow a schema, "" if one can."""
        try:
            self._try(_json_form(schema), left)
        except GrammarError as error:
            return str(error)
        return ""

    def _try(self, form: str, left: _Allowance) -> None:
        """Compile a grammar and write some answers, as long as there is time. Raises GrammarError."""
        matcher = self.compile(form)
        for probe in range(_PROBES):
            walk = matcher.deep_copy()
            for step in range(_PROBE_TOKENS):
                if not left.lasts():
                    return
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
                text, ids = self._vocabulary or read_vocabulary(self._path, self._vocab_size)
                self._tokenizer = LLTokenizer(text, n_vocab=ids, eos_token=self._end_token_ids)
            return self._tokenizer


def read_vocabulary(path: Path, vocab_size: int) -> Vocabulary:
    """Return the vocabulary of a checkpoint with a fast tokenizer."""
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    backend: Any = loaded.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    ids = max(vocab_size, *(i + 1 for i in backend.get_vocab(with_added_tokens=True).values()))
    return Vocabulary(backend.to_str(), ids)


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
    from llguidance import LLMatcher

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
                lark = grammar.text if _LARK.search(grammar.text) else _lark_of(grammar.text)
                return LLMatcher.grammar_from_lark(lark)
    except ValueError as error:
        raise GrammarError(_said(str(error))) from error


def _lark_of(gbnf: str) -> str:
    """Return a GBNF grammar as Lark's. Raises GrammarError.

    llguidance looks through all rules until no more of them is found to be a terminal: twice if each stands behind
    those that it refers to, and else as many times as there are rules.
    """
    from llguidance.gbnf_to_lark import GrammarParser, resolve

    try:
        rules = _references_first(GrammarParser().parse(gbnf))
        resolve(rules)
    except Exception as error:  # it raises bare ones
        raise GrammarError(_said(f"Failed to convert the grammar from GBNF to Lark: {error}")) from error
    return "\n\n".join(("%llguidance {}", *map(str, rules.values())))


def _references_first(rules: Mapping[str, Any]) -> dict[str, Any]:
    """Return rules of GBNF in an order in which each stands behind those that it refers to, as far as there is one."""
    ordered: dict[str, Any] = {}
    seen: set[str] = set()
    for first in rules:
        path = [] if first in seen else [(first, _referred(rules[first]))]
        seen.add(first)
        while path:
            name, referred = path[-1]
            following = next((one for one in referred if one in rules and one not in seen), None)
            if following is None:
                ordered[name] = rules[name]
                path.pop()
            else:
                seen.add(following)
                path.append((following, _referred(rules[following])))
    return ordered


def _referred(rule: Any) -> Iterator[str]:
    """Yield the names that a rule of GBNF refers to."""
    from llguidance.gbnf_to_lark import RuleRefNode

    nodes = [rule]
    while nodes:
        node = nodes.pop()
        if isinstance(node, RuleRefNode):
            yield node.name
        nodes += node.children()


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
