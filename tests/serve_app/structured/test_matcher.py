"""An answer's tokens determine its state in the grammar; wrong or too expensive grammars get an error sentence."""

import asyncio
import contextlib
import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.checkpoints.checkpoint import load_checkpoint_info
from serve_app.config.app import AppConfig
from serve_app.errors import InvalidRequest
from serve_app.replica.grammars import ReplicaMatchers
from serve_app.structured.compiler import GrammarCompiler, GrammarError, llguidance_form
from serve_app.structured.grammar import Grammar
from serve_app.structured.matcher import MAX_COMPILED, SPENT_A_TOKEN_S, AnswerMatcher, Matchers
from serve_app.tokenization.tokenizer import PromptTokenizer

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "kind": {"enum": ["a", "b"]}, "n": {"type": "integer"}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}


def ids_of(tokenizer: PromptTokenizer, text: str) -> np.ndarray:
    return tokenizer.encode(text, b"r" * 16).token_ids


def tokens_of(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


def allowed_ids(matcher: AnswerMatcher, answer: np.ndarray) -> set[int] | None:
    mask = matcher.allowed(answer)
    return None if mask is None else set(np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist())


def test_a_grammar_that_takes_too_much_time_ends_its_answer(compiler: GrammarCompiler) -> None:
    """The time so far is bounded by the tokens so far; a grammar at an honest one's pace never ends.

    docs: isolation
    """
    compiled = compiler.compile(llguidance_form(Grammar.regex("[ab]*", "f")))
    tokens = np.full(2000, max(allowed_ids(AnswerMatcher(compiled), tokens_of()) or ()), dtype=np.int32)
    for taken_s, most in ((0.9 * SPENT_A_TOKEN_S, 2000), (5 * SPENT_A_TOKEN_S, 20)):
        now_s = itertools.count(0.0, taken_s)
        matcher = AnswerMatcher(compiled, clock=lambda: next(now_s))  # noqa: B023
        read = 0
        with contextlib.suppress(GrammarError):
            while read < len(tokens):
                matcher.allowed(tokens[:read])
                read += 1
        assert (read == 2000) if most == 2000 else (read <= most)


def test_an_answer_is_allowed_token_by_token(compiler: GrammarCompiler, tokenizer: PromptTokenizer) -> None:
    """The next token of a fitting answer is always allowed, and end tokens only at its end."""
    matcher = Matchers(compiler).matcher(llguidance_form(Grammar.json_schema(SCHEMA, "f")))
    ids = ids_of(tokenizer, json.dumps({"name": "Bo", "kind": "b", "n": 12}))
    ends = {0, 2}
    for count in range(len(ids) + 1):
        found = allowed_ids(matcher, ids[:count])
        assert found
        assert int(ids[count]) in found if count < len(ids) else found >= ends
        assert count == len(ids) or not found & ends
    assert matcher.allowed(ids_of(tokenizer, "[1")) is None
    brace, space = map(int, ids_of(tokenizer, "{ "))
    assert space not in (allowed_ids(matcher, tokens_of(brace)) or ()), "JSON has one layout"


@settings(max_examples=60, deadline=None)
@given(cuts=st.lists(st.integers(0, 30), min_size=1, max_size=30), rng=st.randoms(use_true_random=False))
def test_the_mask_depends_on_the_answer_alone(compiler: GrammarCompiler, cuts: list[int], rng: Any) -> None:
    """Answers may be read in any order, longer, shorter, different or wrong: the mask is that of a fresh matcher."""
    matchers = Matchers(compiler)
    form = llguidance_form(Grammar.json_schema(SCHEMA, "f"))
    # A random walk through the grammar.
    walk: list[int] = []
    while len(walk) < 30:
        found = sorted(allowed_ids(matchers.matcher(form), np.array(walk, dtype=np.int32)) or ())
        walk.append(rng.choice(found))
        if walk[-1] in (0, 2):
            break
    used = matchers.matcher(form)
    for cut in cuts:
        answer = np.array(walk[:cut], dtype=np.int32)
        if rng.random() < 0.3:
            answer = np.append(answer, np.int32(rng.randrange(4096)))
        assert allowed_ids(used, answer) == allowed_ids(matchers.matcher(form), answer)


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (Grammar.json_schema({"type": "objekt"}, "f"), "Invalid type: objekt"),
        (Grammar.json_schema({"$ref": "file:///etc/passwd"}, "f"), "not present"),
        (Grammar.json_schema({"$ref": "#"}, "f"), "nothing matches it"),
        (Grammar.regex("(", "f"), "unclosed group"),
        (Grammar.regex(r"(a)\1", "f"), "backreferences are not supported"),
        (Grammar.context_free("start: start", "f"), "nothing matches it"),
        (Grammar.context_free("start: " + "(" * 60 + '"a"' + ")" * 60, "f"), "too deeply nested"),
    ],
)
def test_a_grammar_that_cannot_be_followed_says_why(grammar: Grammar, said: str, compiler: GrammarCompiler) -> None:
    with pytest.raises(GrammarError, match=said):
        compiler.compile(llguidance_form(grammar))


BOMBS = [
    ("followed", Grammar.json_schema({"minItems": 10**6, "items": {"minItems": 10**6, "items": {}}}, "f")),
    ("followed", Grammar.json_schema({"type": "string", "pattern": "(a{1,1000}){1,1000}"}, "f")),
    ("ended", Grammar.json_schema({"type": "object", "properties": {f"p{i}": {} for i in range(1500)}}, "f")),
    ("schema too large", Grammar.json_schema(
        {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(4)]} for i in range(10)]}, "f")),
    ("too many expressions constructed", Grammar.regex(".*" * 3000, "f")),
    ("followed", Grammar.regex("(a|b)*a(a|b){200}", "f")),
    ("takes too much work here: .*limit 20000", Grammar.context_free(
        "start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(1000)) + '\na1000: "x"', "f")),
    ("followed", Grammar.context_free('start: start start | "a" | "aa" |', "f")),
]  # fmt: skip
"""Outcomes: followed without end, ended by itself, or refused by one of our limits."""


@pytest.mark.parametrize(("fate", "grammar"), BOMBS, ids=range(len(BOMBS)))
def test_a_hostile_grammar_ends_within_its_limits(grammar: Grammar, fate: str, compiler: GrammarCompiler) -> None:
    """It is refused, or followed for a while: every step ends with a mask or an error, and does no harm.

    docs: api, isolation
    """
    refused = pytest.raises(GrammarError, match=fate) if fate not in ("followed", "ended") else contextlib.nullcontext()
    matcher, answer = None, np.empty(0, dtype=np.int32)
    with refused:
        matcher = AnswerMatcher(compiler.compile(llguidance_form(grammar)), clock=lambda: 0.0)
        while len(answer) < 40 and 2 not in answer:
            found = allowed_ids(matcher, answer)
            assert found
            answer = np.append(answer, np.int32(max(found - {0, 2}, default=2)))
    if matcher is not None:
        assert (2 in answer) == (fate == "ended")
        assert allowed_ids(matcher, np.empty(0, dtype=np.int32)), "it starts again"


def test_a_grammar_may_fail_later_than_its_trial(compiler: GrammarCompiler, tokenizer: PromptTokenizer) -> None:
    """The trial is short. The answer then ends with a GrammarError, as at any other limit."""
    late = {"const": "xq" * 100}, {"type": "string", "pattern": "^(.*a.{5,60}b.*)(c.{3,80}d.*){9}$"}
    schema = {"type": "object", "properties": dict(zip("ab", late, strict=True)), "required": ["a", "b"]}
    form, _ = compiler.checked(Grammar.json_schema(schema, "f"))
    matcher, answer, rng = AnswerMatcher(compiler.compile(form), clock=lambda: 0.0), [], random.Random(0)
    with pytest.raises(GrammarError, match="takes too much work here"):
        for _ in range(3000):
            answer.append(rng.choice(sorted(allowed_ids(matcher, np.array(answer, dtype=np.int32)) - {0, 2})))
    assert len(answer) > len(tokenizer.encode("xq" * 100, b"r" * 16).token_ids)


def test_a_tenant_compiles_its_own_grammars(demo_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar of another tenant compiles as slowly as a new one, so its speed does not tell that it is used."""
    compiled: list[str] = []
    compile_one = GrammarCompiler.compile

    def counted(self: GrammarCompiler, text: str) -> Any:
        compiled.append(text)
        return compile_one(self, text)

    monkeypatch.setattr(GrammarCompiler, "compile", counted)
    matchers = ReplicaMatchers(AppConfig(), load_checkpoint_info(demo_model_path))
    form = llguidance_form(Grammar.regex("[ab]{3}", "f"))

    async def run() -> None:
        for tenant, times in (("a", 1), ("b", 2), ("a", 2), ("b", 2)):
            matcher = await matchers.matcher(form, tenant)
            assert (matcher.text, matcher.tenant) == (form, tenant)
            assert compiled == [form] * times, tenant

    asyncio.run(run())


def test_choices_are_told_literally(compiler: GrammarCompiler, tokenizer: PromptTokenizer) -> None:
    """Quotes, line breaks and letters of any language stand for themselves; a bounded number stays compiled."""
    matchers = Matchers(compiler)
    for text in ('a"b\\', "x\ny", "木 déjà", "{{}}", "%", *(f"v{number}" for number in range(MAX_COMPILED))):
        matcher = matchers.matcher(llguidance_form(Grammar.choice([text, "other"], "f")))
        assert {0, 2} <= (allowed_ids(matcher, ids_of(tokenizer, text)) or set())
    assert len(matchers._compiled) == MAX_COMPILED
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        Grammar.regex("\ud800", "f")
