"""Schemas that others wrote are followed, or refused by name before an answer begins."""

import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from serve_app.api.request import ToolUse
from serve_app.errors import InvalidRequest
from serve_app.generation.tool_calls.formats import forced_calls
from serve_app.structured.compiler import GrammarCompiler, GrammarError
from serve_app.structured.grammar import Grammar
from serve_app.structured.matcher import AnswerMatcher
from serve_app.tokenization.tokenizer import PromptTokenizer
from tests.serve_app.structured import real_schemas
from tests.serve_app.structured.walks import Walker, fits

MISSING = pytest.mark.skipif(
    not real_schemas.CACHE.is_dir(), reason="the schemas are not here; make test-schemas downloads them"
)
SOURCES = [
    pytest.param(real_schemas.zod, 50, 1.0, id="zod"),
    pytest.param(real_schemas.models, 80, 0.95, id="models"),
    pytest.param(real_schemas.suite, 700, 0.6, id="suite", marks=MISSING),
    pytest.param(real_schemas.schema_store, 400, 0.4, id="schema-store", marks=MISSING),
    pytest.param(real_schemas.linter, 20, 0.1, id="linter", marks=MISSING),
    pytest.param(real_schemas.kubernetes, 100, 0.8, id="kubernetes", marks=MISSING),
]
ANSWERS, TOKENS = 3, 100


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("source", "least", "share"), SOURCES)
def test_a_real_schema_is_followed_or_refused_by_name(
    compiler: GrammarCompiler,
    tokenizer: PromptTokenizer,
    source: Callable[[], real_schemas.Named],
    least: int,
    share: float,
    record_property: Callable[[str, object], None],
) -> None:
    """No answer breaks off, every answer that ends fits its schema, and a tool with the schema fails no request.

    docs: api
    """
    walker, counts, refused = Walker(tokenizer), Counter[str](), Counter[str]()
    for number, (name, schema) in enumerate(source()):
        try:
            grammar = Grammar.json_schema(schema, "f")
            form, left_out = compiler.checked(grammar)
        except (GrammarError, InvalidRequest) as error:
            counts["refused"] += 1
            refused[_reason(str(error))] += 1
        else:
            counts["loosened" if left_out else "followed"] += 1
            compiled = compiler.compile(form)
            for seed in range(ANSWERS):
                text, ended = walker.answer(AnswerMatcher(compiled, clock=lambda: 0.0), seed, TOKENS)
                assert not ended or left_out or fits(schema, json.loads(text)), (name, text)
        if number % 4 == 0:
            function: dict[str, Any] = {"name": "f", "parameters": schema}
            try:
                calls = forced_calls(ToolUse(({"type": "function", "function": function},), must_call=True))
            except InvalidRequest as error:
                assert "at most" in str(error), (name, error)
            else:
                compiler.checked(calls)
    print(f"\n{dict(counts)}; refused: {dict(refused.most_common())}")
    record_property("counts", dict(counts))
    assert counts.total() >= least
    assert counts["followed"] + counts["loosened"] >= share * counts.total()


def _reason(error: str) -> str:
    """Return a refusal's keyword, or its words without names."""
    found = re.match(r"`([^`]+)`", error)
    return found[1] if found else re.sub(r"['\"/:#].*|\d+", "", error).strip()
