"""The fields that say which tokens may be chosen and what an answer must match: read as sent, or a 400."""

import json
from typing import Any

import pytest

from serve_app.errors import InvalidRequest
from serve_app.structured.grammar import Grammar
from tests.serve_app.api.openai.bodies import assert_names_its_field, chat, complete


def test_what_an_answer_must_match_is_one_grammar() -> None:
    """By OpenAI's field or by vLLM's; a schema keeps the order of its properties."""
    schema = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
    asked = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    wanted = Grammar.json_schema(schema, "response_format.json_schema.schema")
    assert chat(response_format=asked).grammar == wanted
    assert wanted.text.index('"b"') < wanted.text.index('"a"')
    assert chat(response_format={"type": "json_object"}).grammar == Grammar.json_object("response_format")
    for as_sent in (schema, json.dumps(schema)):
        found = complete(structured_outputs={"json": as_sent, "regex": None}).grammar
        assert found == Grammar.json_schema(schema, "structured_outputs.json")
    for kind, value in (("regex", "a+"), ("choice", ["a", "b"]), ("grammar", 'start: "a"')):
        found = chat(structured_outputs={kind: value}).grammar
        assert found is not None
        assert (found.kind, found.field) == (kind, f"structured_outputs.{kind}")
    assert chat(structured_outputs={"json_object": True}).grammar == Grammar.json_object(
        "structured_outputs.json_object"
    )
    with pytest.raises(InvalidRequest, match=r"guided_regex is not supported.*use structured_outputs\.regex"):
        chat(guided_regex="a+")


DEEP = json.loads('{"items": ' * 70 + "{}" + "}" * 70)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"response_format": {"type": 3}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": DEEP}}},
         "response_format.json_schema.schema"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "(" * 65}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ],
)  # fmt: skip
def test_a_wrong_field_of_sampling_is_a_400_that_names_it(fields: dict[str, Any], param: str) -> None:
    """A part of one is wrong, or two do not go together."""
    assert_names_its_field(fields, param)
