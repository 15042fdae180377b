"""What a grammar may cost before it runs: steps that grow with its size alone, time, and nothing for who has left."""

import json
import sys
from collections.abc import Callable, Iterator
from itertools import count, islice, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance.gbnf_to_lark import is_lark_syntax

from serve_app.checkpoints.checkpoint import load_checkpoint_info
from serve_app.errors import InvalidRequest
from serve_app.fairness.queue import FairWorkers
from serve_app.fairness.shares import Shares
from serve_app.fairness.work import AbandonedError, StepBudget, ThreadJob, TooMuchWorkError, set_job
from serve_app.generation.rules import CheckedGrammars
from serve_app.structured.compiler import _LARK, GrammarCompiler, GrammarError, llguidance_form
from serve_app.structured.grammar import Grammar, ToolPart
from serve_app.structured.schema import MAX_STEPS, followable

TEXT = {"type": "string"}


def spellings(pointer: str) -> Iterator[str]:
    """Yield spellings of one reference: each letter as itself or as its code."""
    letters = [(char, f"%{ord(char):02x}") if char != "/" else ("/",) for char in pointer]
    return (f"#/{''.join(spelled)}" for spelled in product(*letters))


def steps_of(schema: dict[str, Any]) -> int:
    steps = StepBudget(MAX_STEPS)
    followable(schema, steps=steps)
    return MAX_STEPS - steps.left


def spelled(number: int, part: Callable[[str], Any], keyword: str = "anyOf") -> dict[str, Any]:
    references = islice(spellings("$defs/big"), number)
    return {"$defs": {"big": {keyword: [part(one) for one in references]}}, "$ref": "#/$defs/big"}


SCHEMAS: list[Callable[[int], dict[str, Any]]] = [
    lambda n: spelled(n, lambda one: {"$ref": one}),
    lambda n: spelled(n, lambda one: {"anyOf": [{"$ref": one}, {"type": "null"}]}, "allOf"),
    lambda n: spelled(n, lambda one: {"type": "object", "properties": {"a": {"$ref": one}}, "required": ["a"]}),
    lambda n: spelled(n, lambda one: {"type": "array", "items": {"$ref": one}, "minItems": 1}, "allOf"),
    lambda n: {"$defs": {f"d{at}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{at + 1}"}},
                                    "required": ["a"]} for at in range(n)} | {f"d{n}": TEXT}, "$ref": "#/$defs/d0"},
    lambda n: {"$defs": {f"d{n - at:05}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{n - at + 1:05}"}},
                                           "required": ["a"]} for at in range(n)} | {f"d{n + 1:05}": TEXT}},
    lambda n: {"properties": {f"p{at}": {"$id": f"https://example.com/{at}", "items": TEXT} for at in range(n)}},
    lambda n: {"properties": {f"p{at}": {"propertyNames": {"enum": [f"e{at}"]}} for at in range(n)}},
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS)
def test_the_steps_of_a_schema_grow_with_its_size(schema: Callable[[int], dict[str, Any]]) -> None:
    """References are resolved once, whatever their number and spelling: they were a cube, of a minute for 18 KB."""
    for number in (32, 128):
        sizes = [len(json.dumps(schema(n))) for n in (number, 2 * number)]
        steps = [steps_of(schema(n)) for n in (number, 2 * number)]
        assert steps[1] / steps[0] < 1.2 * sizes[1] / sizes[0]


def test_equal_references_get_one_spelling() -> None:
    """So that llguidance compiles what they name once; other ones stay as they are."""
    schema = {
        **spelled(64, lambda one: {"items": {"$ref": one}}),
        "items": {"$ref": "#/$defs/none"},
        "not": {"$ref": "x.json"},
    }
    references = {one["items"]["$ref"] for one in followable(schema).schema["$defs"]["big"]["anyOf"]}
    assert references == {"#/$defs/big"}
    assert followable(schema).schema["items"] == {"$ref": "#/$defs/none"}


def _ends(schema: Any, root: Any, within: frozenset[str] = frozenset()) -> bool:
    """Return whether a finite value fits, as by a plain search that enters no reference twice."""
    if not isinstance(schema, dict):
        return schema is not False
    if (reference := schema.get("$ref")) is not None:
        part = root if reference == "#" else root["$defs"].get(reference.removeprefix("#/$defs/"), True)
        if reference in within or not _ends(part, root, within | {reference}):
            return False
    for name, every in (("allOf", all), ("anyOf", any)):
        if name in schema and not every(_ends(one, root, within) for one in schema[name]):
            return False
    parts = [schema["properties"].get(name, True) for name in schema.get("required", ())]
    return all(_ends(part, root, within) for part in parts)


_NAMES = "abcd"
_REFERENCES = st.sampled_from(["#", *(f"#/$defs/{name}" for name in _NAMES)]).map(lambda one: {"$ref": one})
_PARTS = st.recursive(
    st.one_of(_REFERENCES, st.just(True), st.just(TEXT)),
    lambda part: st.one_of(
        st.builds(lambda parts: {"anyOf": parts}, st.lists(part, min_size=1, max_size=3)),
        st.builds(lambda parts: {"allOf": parts}, st.lists(part, min_size=1, max_size=3)),
        st.builds(lambda one, other, required: {"type": "object", "properties": {"x": one, "y": other},
                                                "required": required},
                  part, part, st.lists(st.sampled_from("xy"), unique=True)),
    ),
    max_leaves=6,
)  # fmt: skip


@given(_PARTS, st.fixed_dictionaries(dict.fromkeys(_NAMES, _PARTS)))
def test_what_no_finite_value_fits_is_false(root: Any, named: dict[str, Any]) -> None:
    """Rings of references in any form: each is left in, or cut where every value would hold another one."""
    schema = {"allOf": [root], "$defs": named}

    def cut(part: Any) -> Any:
        if isinstance(part, list):
            return [cut(one) for one in part]
        if not isinstance(part, dict):
            return part
        if "$ref" in part and not _ends({"$ref": part["$ref"]}, schema):
            return False
        return {name: cut(one) for name, one in part.items()}

    assert followable(schema).schema == (cut(schema) if _ends(schema, schema) else False)


def test_a_schema_that_would_grow_is_not_made(compiler: GrammarCompiler) -> None:
    """Lists of names by reference, long paths above many parts, alternatives with long lists: each has its bound."""
    names = {"enum": [f"v{at}" for at in range(3000)]}
    many = {
        "properties": {f"p{at}": {"propertyNames": {"$ref": "#/$defs/n"}} for at in range(500)},
        "$defs": {"n": names},
    }
    assert len(json.dumps(followable(many).schema)) < 20 * len(json.dumps(many))
    parts = {"properties": {"a" * 30_000: {"properties": {f"p{at}": {} for at in range(3000)}}}}
    with pytest.raises(TooMuchWorkError):
        followable(parts)
    with pytest.raises(GrammarError, match="too much work"):
        compiler.checked(Grammar.json_schema(parts, "f"))
    listed = {"type": "object", "properties": [], "required": [f"r{at}" for at in range(5000)]}
    apart = {"oneOf": [{"$ref": "#/$defs/l"}] * 300, "$defs": {"l": listed}}
    assert [one.keyword for one in followable(apart).left_out] == ["oneOf"]


def test_the_search_for_the_wrong_part_has_an_end(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the number of parts that are compiled, also of one part's keywords, and by time; the error stays the same."""
    compiled, ticks = count(), count()
    whole = compiler.compile

    def counted(text: str) -> Any:
        next(compiled)
        return whole(text)

    monkeypatch.setattr(compiler, "compile", counted)
    wrong = {**{f"x{at}": 1 for at in range(400)}, "type": "string", "pattern": "(?=a)"}
    with pytest.raises(GrammarError, match="look-ahead"):
        compiler.checked(Grammar.json_schema(wrong, "f"))
    assert next(compiled) < 300
    monkeypatch.setattr(compiler, "_clock", lambda: next(ticks) * 0.1)
    before = next(compiled)
    with pytest.raises(GrammarError, match="look-ahead"):
        compiler.checked(
            Grammar.json_schema(
                {"properties": {f"p{at}": {**TEXT, "x": at} for at in range(40)} | {"z": {**TEXT, "pattern": "(?=a)"}}},
                "f",
            )
        )
    assert next(compiled) - before < 20
    parameters = [
        {"type": "object", "properties": {"a": {"type": "string", "pattern": f"(?={at})"}}} for at in range(40)
    ]
    tools = [ToolPart(f"t{at}", f"#/anyOf/{at}", strict=False) for at in range(40)]
    form, left_out = compiler.checked(Grammar.json_schema({"anyOf": parameters}, "tools", tools=tools))
    assert "(?=" not in form and len(left_out) == 40 and "it takes too long to check" in left_out[-1]


def test_nobody_waits_for_a_grammar_of_a_client_that_left(compiler: GrammarCompiler) -> None:
    """Its check ends at the next step, and is not remembered as a failure."""
    job = ThreadJob()
    job.abandoned = True
    set_job(job)
    try:
        for grammar in (Grammar.json_schema({"type": "object"}, "f"), Grammar.regex("a*", "f")):
            with pytest.raises(AbandonedError):
                compiler.checked(grammar)
    finally:
        set_job(None)


@pytest.mark.anyio
async def test_a_refusal_is_remembered(demo_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By tenant, in the same words; also for those that waited meanwhile."""
    grammars = CheckedGrammars(load_checkpoint_info(demo_model_path), FairWorkers(Shares({}), threads=1))
    checked, whole = list[str](), grammars._trials.checked

    def counted(grammar: Grammar) -> Any:
        checked.append(grammar.text)
        return whole(grammar)

    monkeypatch.setattr(grammars._trials, "checked", counted)
    bad, good = Grammar.regex("(?=a)", "f"), Grammar.regex("a*", "f")
    said = set[str]()
    for tenant in ("a", "a", "b"):
        with pytest.raises(InvalidRequest) as refused:
            await grammars.form(bad, tenant)
        said.add(refused.value.message)
        await grammars.form(good, tenant)
    assert len(said) == 1 and checked == [bad.text, good.text] * 2


@pytest.mark.parametrize(
    "text",
    [
        lambda n: "\n" * 40 * n + 'root ::= "a"',
        lambda n: "root ::= r0\n" + "".join(f"r{at} ::= r{at + 1}\n" for at in range(n)) + f'r{n} ::= "a"',
        lambda n: "root ::= r0\n" + "".join(f"r{at} ::= r{(at + 1) % n} | \"a\"\n" for at in range(n)),
        lambda n: 'root ::= "a"\n' + "# a\n" * 8 * n,
    ],
)  # fmt: skip
def test_a_grammar_of_gbnf_is_read_once(text: Callable[[int], str]) -> None:
    """Line ends and chains of rules, which were squares: 51 KB of line ends took half a minute."""

    def calls_of(n: int) -> int:
        calls = 0

        def called(*_: Any) -> None:
            nonlocal calls
            calls += 1

        before = sys.getprofile()
        sys.setprofile(called)
        try:
            llguidance_form(Grammar.context_free(text(n), "f"))
        finally:
            sys.setprofile(before)
        return calls

    calls_of(8)
    assert calls_of(160) < 2.6 * calls_of(80)


@given(st.lists(st.sampled_from(["start", ":", " ", "\n", "%llguidance", "root ::= ", '"a"', "\r", "{}", "\x0b"])))
def test_larks_grammars_are_told_from_gbnfs_as_llguidance_does(words: list[str]) -> None:
    """By the same beginnings of lines."""

    text = "".join(words)
    assert (_LARK.search(text) is not None) == is_lark_syntax(text)
