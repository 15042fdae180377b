"""A schema is followed, or refused with the keyword before the answer begins; an answer has no needless white space."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serve_app.api.request import ToolUse
from serve_app.errors import InvalidRequest
from serve_app.generation.tool_calls.formats import forced_calls
from serve_app.structured.compiler import GrammarCompiler, GrammarError
from serve_app.structured.grammar import Grammar
from serve_app.structured.matcher import AnswerMatcher
from serve_app.tokenization.tokenizer import PromptTokenizer
from tests.serve_app.structured.walks import ENDS, Walker, fits

INTEGER, TEXT = {"type": "integer"}, {"type": "string"}
TAGGED = {
    "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
    "discriminator": {"propertyName": "kind"},
    "$defs": {
        name: {"type": "object", "properties": {"kind": {"const": name}, "n": INTEGER}, "required": ["kind"]}
        for name in "AB"
    },
}


def matches(compiler: GrammarCompiler, tokenizer: PromptTokenizer, form: str, value: Any) -> bool:
    matcher = compiler.compile(form)
    ids = tokenizer.encode(json.dumps(value, ensure_ascii=False), b"r" * 16).token_ids.tolist()
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "values", "wrong"),
    [
        # Zod 4 writes propertyNames for every record.
        ({"type": "object", "propertyNames": TEXT, "additionalProperties": INTEGER}, [{"a": 1}, {}], [{"a": "b"}]),
        ({"type": "object", "propertyNames": {"$ref": "#/$defs/T"}, "$defs": {"T": TEXT}}, [{"a": 1}], [3]),
        (
            {"type": "object", "propertyNames": {"type": "string", "enum": ["a", "b"]}, "additionalProperties": INTEGER,
             "required": ["a"]},
            [{"a": 1}, {"a": 1, "b": 2}], [{"b": 2}, {"a": 1, "c": 2}, {"a": "x"}],
        ),
        ({"type": "object", "propertyNames": {"pattern": "^x-"}, "additionalProperties": INTEGER},
         [{"x-a": 1}, {}], [{"a": 1}, {"x-a": "b"}]),
        ({"type": "object", "propertyNames": {"type": "string", "minLength": 2}}, [{"ab": 1}], [{"a": 1}]),
        ({"type": "string", "format": "password"}, ["a b"], [1]),
        ({"type": "string", "format": "date"}, ["2026-02-03"], ["03.02.2026"]),
        ({"type": "integer", "format": "int64"}, [5], ["5"]),
        ({"$schema": "https://example.com/own", "$id": "my schema", "type": "boolean", "title": "T", "default": False,
          "examples": [True], "deprecated": True, "readOnly": True, "nullable": True, "x-order": 1, "$comment": "c"},
         [True], [1]),
        (TAGGED, [{"kind": "A", "n": 1}, {"kind": "B"}], [{"kind": "C"}, {"n": 1}]),
        ({"type": "array", "uniqueItems": False, "items": INTEGER}, [[1, 1]], [["a"]]),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, [["a"]], [["a", "b"]]),
        ({"type": "object", "properties": {"a": INTEGER}, "unevaluatedProperties": False}, [{"a": 1}], [{"b": 1}]),
        ({"type": "object", "dependentRequired": {}, "unevaluatedProperties": True}, [{"a": 1}], [1]),
        ({"type": "string", "minLength": 2.0, "contains": {}, "uniqueItems": True}, ["ab"], ["a"]),
        ({"if": {"type": "string"}, "type": "integer", "not": False}, [1], ["a"]),
        ({"type": "string", "x-guidance": {"whitespace_pattern": " +"}}, ["a"], [1]),
        ({"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"]},
         [{"next": {"next": None}}], [{"next": 1}]),
        ({"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}],
          "$defs": {"N": {"type": "object", "properties": {"n": {"$ref": "#/$defs/N"}}, "required": ["n"]}}},
         [None], [{}, {"n": None}]),
    ],
)  # fmt: skip
def test_a_schema_is_followed(
    compiler: GrammarCompiler, tokenizer: PromptTokenizer, schema: dict[str, Any], values: list[Any], wrong: list[Any]
) -> None:
    """Keywords that say nothing are ignored, others have an equal form.

    docs: api
    """
    form, _ = compiler.checked(Grammar.json_schema(schema, "f", strict=True))
    assert [matches(compiler, tokenizer, form, value) for value in values] == [True] * len(values)
    assert [matches(compiler, tokenizer, form, value) for value in wrong] == [False] * len(wrong)
    assert all(fits({**schema, "$id": ""}, value) for value in values)


@pytest.mark.parametrize(
    ("schema", "values", "left_out"),
    [
        *(
            ({"type": kind, name: sign * value}, [1, -1], [name])
            for kind in ("integer", "number")
            for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
            for sign in (1, -1)
            for value in (2**53 + 1, 10**18, 2**63 - 1, 2**63, 2**64, 10**30, 1e19, 1e308, 1e-300)
        ),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, [0, -5], ["minimum", "maximum"]),
        ({"type": "integer", "minimum": -(2**53), "maximum": 2**53}, [0, 2**53, -(2**53)], []),
        ({"type": "number", "minimum": 1e-50}, [1], []),
        ({"type": "string", "maxLength": 2**32}, ["a"], []),
        ({"type": "string", "minLength": 2**64}, ["a"], ["minLength"]),
        ({"type": "array", "maxItems": 1e308, "minItems": 2**63}, [[]], ["minItems"]),
        ({"type": "object", "maxProperties": 2**64, "minProperties": 1e30}, [{}], ["minProperties"]),
        ({"type": "object", "propertyNames": {"maxLength": 2**64}}, [{"a": 1}], []),
        ({"type": "object", "propertyNames": {"minLength": 1e19, "maxLength": 1e19}}, [{"a": 1}], ["minLength"]),
        *(({"type": "integer", "multipleOf": step}, [7], ["multipleOf"]) for step in (99_991, 2**31, 2**63, 1e308)),
        ({"type": "number", "multipleOf": 123.4567}, [7], ["multipleOf"]),
        ({"type": "integer", "multipleOf": 10**9}, [0, 2 * 10**9], ["multipleOf"]),
        ({"type": "integer", "multipleOf": 429 * 10**6}, [0, 429 * 10**6, 429 * 10**7], []),
        ({"const": -(2**63)}, [-(2**63), 1], ["const"]),
        ({"enum": ["a", -(2**63) + 1]}, ["a", "b", 1], ["enum"]),
        ({"const": {"a": [-(2**63)]}}, [{"a": 1}], ["const"]),
        ({"enum": [2**63, 10**30, -(10**30)]}, [2**63, 10**30, -(10**30)], ["enum"]),
        ({"const": 2**53 + 1}, [2**53 + 1], ["const"]),
        ({"enum": [2**53, -(2**53), -(2.0**63), 1e30]}, [2**53, -(2**53), 10**30], []),
    ],
)
def test_numbers_beyond_what_can_be_counted_are_left_to_the_type(
    compiler: GrammarCompiler,
    tokenizer: PromptTokenizer,
    schema: dict[str, Any],
    values: list[Any],
    left_out: list[str],
) -> None:
    """With a warning: Go and Java write the bounds of 64 bits. None of them takes long, or ends the process."""
    form, found = compiler.checked(Grammar.json_schema(schema, "f"))
    assert [line.split("`")[1] for line in found] == left_out
    assert [matches(compiler, tokenizer, form, value) for value in values] == [True] * len(values)
    kinds = schema.get("type")
    assert kinds is None or not matches(compiler, tokenizer, form, None)


def test_many_divisors_are_counted_together(compiler: GrammarCompiler) -> None:
    """Each has a state for each of its remainders; what is over the bound is named."""
    steps = {f"p{at}": {"type": "integer", "multipleOf": 9967 + 2 * at} for at in range(50)}
    form, found = compiler.checked(Grammar.json_schema({"type": "object", "properties": steps}, "f"))
    assert len(found) == 49 and form.count("multipleOf") == 1
    same = {f"p{at}": {"type": "number", "multipleOf": 0.01} for at in range(50)}
    assert compiler.checked(Grammar.json_schema({"type": "object", "properties": same}, "f"))[1] == ()


LOOP = {"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "object", "properties": {"a/b": {"not": {"type": "null"}}}}, "`not` at #/properties/a~1b is not sup"),
        ({"items": {"type": "array", "uniqueItems": True}}, "`uniqueItems` at #/items is not supported"),
        ({"if": {"type": "null"}, "then": False}, "`if` at # is not supported"),
        ({"type": "object", "propertyNames": {"format": "date"}}, "`propertyNames` at #"),
        ({"anyOf": [INTEGER, {"type": "string", "pattern": "(?!a)b"}]}, "`pattern` at #/anyOf/1: look-around"),
        ({"items": {"type": "number", "multipleOf": 0}}, "`multipleOf` at #/items"),
        ({"type": "object", "patternProperties": {"^a": TEXT, "a$": INTEGER}}, "`patternProperties` at #"),
        ({"type": "object", "properties": {"a": TEXT}, "patternProperties": {"^a": INTEGER}, "required": ["a"]},
         "`patternProperties`: .*required property 'a'"),
        ({"type": "object", "patternProperties": {"a$": {"$ref": "#"}}, "required": ["a"]},
         "`patternProperties`: it takes too much work"),
        (LOOP, "nothing matches it, because a part that it requires"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "nothing matches it"),
        ({"oneOf": [INTEGER, {"type": "number"}]}, "`oneOf` at # is not supported"),
        ({"oneOf": [INTEGER] * 3000}, "`oneOf` at #"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_keyword_before_the_answer(compiler: GrammarCompiler, schema: Any, said: str) -> None:
    """Its place is a JSON pointer.

    docs: api
    """
    with pytest.raises(GrammarError, match=said):
        compiler.checked(Grammar.json_schema(schema, "f", strict=True))


def test_alternatives_that_overlap_are_allowed_unless_strict(compiler: GrammarCompiler) -> None:
    schema = {"oneOf": [INTEGER, {"type": "number"}], "title": "n"}
    _, left_out = compiler.checked(Grammar.json_schema(schema, "f"))
    assert left_out == ("`oneOf` at #",)
    assert compiler.checked(Grammar.json_schema({"type": "string", "format": "iri"}, "f", strict=True))[1] == (
        "`format: iri` at #",
    )


def tool(name: str, **schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", **schema}}}


@pytest.mark.parametrize(
    ("schema", "said", "still"),
    [
        ({"properties": {"a": {"not": TEXT}, "b": INTEGER}}, "tool odd: `not` at #/properties/a", {"b": "no"}),
        ({"properties": {"a": {**TEXT, "pattern": "(?=a)"}}}, "tool odd: any arguments, because `pattern` at", None),
        ({"properties": {"a": {"type": "objekt"}}}, "tool odd: any arguments, because `type` at #/properties/a", None),
    ],
)  # fmt: skip
def test_a_tool_that_cannot_be_followed_fails_no_request(
    compiler: GrammarCompiler, tokenizer: PromptTokenizer, schema: dict[str, Any], said: str, still: Any
) -> None:
    """The other tools keep their schemas, and a strict tool is refused.

    docs: api
    """
    use = ToolUse((tool("plain", properties={"n": INTEGER}, required=["n"]), tool("odd", **schema)), must_call=True)
    form, left_out = compiler.checked(forced_calls(use))
    assert len(left_out) == 1 and left_out[0].startswith(said)

    def calls(name: str, arguments: Any) -> bool:
        return matches(compiler, tokenizer, form, [{"name": name, "parameters": arguments}])

    assert calls("plain", {"n": 1}) and not calls("plain", {"n": "x"})
    assert calls("odd", {"a": 3}) and calls("odd", still or {}) == (still is None)
    strict = ToolUse(use.tools, must_call=True, strict=frozenset({"odd"}))
    with pytest.raises(GrammarError, match="tool odd: "):
        compiler.checked(forced_calls(strict))


def test_only_what_constrains_calls_counts_towards_their_size(compiler: GrammarCompiler) -> None:
    """A property may be named like an annotation."""
    told = {"title": "T" * 200_000, "default": {"a": [1] * 10}, "examples": ["e"]}
    said = tool("f", properties={"description": {**TEXT, **told}, "default": INTEGER}, required=["description"], **told)
    grammar = forced_calls(ToolUse((said,), must_call=True))
    parameters = json.loads(grammar.text)["items"]["properties"]["parameters"]
    bare = {"type": "object", "properties": {"description": TEXT, "default": INTEGER}, "required": ["description"]}
    assert parameters == bare
    assert compiler.checked(grammar)[1] == ()
    many = tuple(tool(f"f{at}", properties={"a": {"enum": ["x" * 99] * 99}}) for at in range(30))
    with pytest.raises(InvalidRequest, match=r"at most 262144 characters.*use tool_choice auto") as caught:
        forced_calls(ToolUse(many, must_call=True))
    assert caught.value.param == "tools"


CALL = ToolUse((tool("f", properties={"ok": {"type": "boolean"}}, required=["ok"], additionalProperties=False),))
OK = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.json_schema(OK, "f"),
        Grammar.json_object("f"),
        Grammar.json_schema({"x-guidance": {"whitespace_flexible": True}, **OK}, "f"),
        forced_calls(ToolUse(CALL.tools, parallel=False)),
    ],
    ids=["schema", "object", "options", "call"],
)
def test_a_model_that_loves_white_space_finishes(
    compiler: GrammarCompiler, tokenizer: PromptTokenizer, grammar: Grammar
) -> None:
    """It writes it wherever it may outside strings, and else ends what it can: JSON has one layout.

    docs: api
    """
    matcher = AnswerMatcher(compiler.compile(compiler.checked(grammar)[0]))
    texts = [tokenizer.decode([number]) for number in range(4096)]
    ids: list[int] = []
    for _ in range(30):
        mask = matcher.allowed(np.array(ids, dtype=np.int32))
        assert mask is not None
        allowed = set(np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist())
        if allowed & set(ENDS):
            break
        inside = tokenizer.decode(ids).replace('\\"', "").count('"') % 2
        blank = [] if inside else [number for number in allowed if texts[number].isspace()]
        ids.append(max(blank or allowed, key=lambda number: (texts[number] in ("}", "]", '"'), len(texts[number]))))
    else:
        pytest.fail(f"it goes on: {tokenizer.decode(ids)!r}")
    value = json.loads(tokenizer.decode(ids))
    assert json.dumps(value) == tokenizer.decode(ids)


NAMES = st.sampled_from(["a", "ab", "x-a", "", "é/~", "$ref"])
PATTERNS = st.sampled_from(["^a", "a$", "^[a-z]+$", "", ".*", "^x-", "^\\d{2,4}$", "(?!a)", "(", "^[^a]"])
COUNTS = st.integers(0, 4) | st.sampled_from([2.0, -1, 10**9, "3"])
LEAVES = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(
            ["string", "integer", "number", "boolean", "null", "object", "array", ["string", "null"], "any", []]
        ),
        "minLength": COUNTS, "maxLength": COUNTS, "minItems": COUNTS, "maxItems": COUNTS, "minProperties": COUNTS,
        "maxProperties": COUNTS, "pattern": PATTERNS, "minimum": st.sampled_from([0, -1.5, 10**30, 1e300, None]),
        "exclusiveMaximum": st.sampled_from([3, 0.25, True]), "multipleOf": st.sampled_from([2, 0.1, 0, 7e-9]),
        "format": st.sampled_from(["date", "uri", "byte", "iri", "", 3]), "required": st.lists(NAMES, max_size=2),
        "enum": st.lists(st.sampled_from(["a", 1, 1.0, None, True, {"a": 1}, [2]]), max_size=3),
        "const": st.sampled_from(["a", 2, {"ab": []}]), "uniqueItems": st.booleans(), "deprecated": st.just(True),
        "$ref": st.sampled_from(["#", "#/$defs/a", "#/$defs/ab", "#/properties/a", "#b", "http://x/y", "#/%zz", 3]),
        "nullable": st.just(True), "x-guidance": st.just(1), "$id": st.sampled_from(["a b", "http://x/y", "", 1]),
        "$schema": st.sampled_from(["http://json-schema.org/draft-07/schema#", "x:y", 3]),
        "dependentRequired": st.dictionaries(NAMES, st.lists(NAMES, max_size=1), max_size=1),
    },
)  # fmt: skip


def _larger(part: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    named, several = st.dictionaries(NAMES, part, max_size=3), st.lists(part, max_size=3)
    own = st.fixed_dictionaries(
        {},
        optional={
            "properties": named, "patternProperties": st.dictionaries(PATTERNS, part, max_size=2), "$defs": named,
            "additionalProperties": part, "items": part | several, "prefixItems": several, "propertyNames": part,
            "anyOf": several, "oneOf": several, "allOf": several, "not": part, "if": part, "then": part,
            "contains": part, "unevaluatedProperties": part | st.booleans(), "dependentSchemas": named,
        },
    )  # fmt: skip
    return st.builds(lambda first, second: {**first, **second}, LEAVES, own)


SCHEMAS = st.recursive(LEAVES | st.booleans(), _larger, max_leaves=6).filter(lambda schema: isinstance(schema, dict))


@settings(max_examples=300)
@example(schema={"multipleOf": 7e-9}, strict=False, forced=False, seed=1)
@given(schema=SCHEMAS, strict=st.booleans(), forced=st.booleans(), seed=st.integers(0, 99))
def test_no_schema_fails_an_answer(
    compiler: GrammarCompiler, tokenizer: PromptTokenizer, schema: Any, strict: bool, forced: bool, seed: int
) -> None:
    """Any schema is refused before the answer, or followed without an error; an answer that ends fits it.

    docs: api
    """
    use = ToolUse((tool("f", **schema),), must_call=True, strict=frozenset({"f"} if strict else ()))
    try:
        form, left_out = compiler.checked(
            forced_calls(use) if forced else Grammar.json_schema(schema, "f", strict=strict)
        )
    except GrammarError:
        assert strict or not forced, "only a strict tool is refused"
        return
    text, ended = Walker(tokenizer).answer(AnswerMatcher(compiler.compile(form), clock=lambda: 0.0), seed, 60)
    if ended and not left_out:
        value = json.loads(text)
        part = {**schema, "type": "object"} if forced else schema
        for one in [call["parameters"] for call in value] if forced else [value]:
            assert fits({name: each for name, each in part.items() if name != "$id"}, one)
