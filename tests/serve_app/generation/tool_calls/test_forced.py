"""An answer that must call can be nothing else, and its arguments follow the tools' schemas."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.api.request import ToolUse
from serve_app.generation.tool_calls.formats import forced_calls
from serve_app.structured.compiler import GrammarCompiler, llguidance_form
from serve_app.tokenization.tokenizer import PromptTokenizer
from tests.serve_app.tool_templates.families import SEARCH, WEATHER

NESTED: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "plan",
        "parameters": {
            "$defs": {"stop": {"type": "object", "properties": {"at": {"$ref": "#/$defs/place"}}, "required": ["at"],
                               "additionalProperties": False},
                      "place": {"enum": ["Oslo", "Bergen"]}},
            "properties": {"stops": {"type": "array", "items": {"$ref": "#/$defs/stop"}}},
            "required": ["stops"],
            "additionalProperties": False,
        },
    },
}  # fmt: skip
RAIN = '{"name": "get_weather", "parameters": {"city": "Oslo"}}'
FIND = '{"name": "search", "parameters": {"anything": [1, null]}}'
PLAN = '{"name": "plan", "parameters": {"stops": [{"at": "Oslo"}, {"at": "Bergen"}]}}'
EVERY = (WEATHER, SEARCH, NESTED)


@pytest.mark.parametrize(
    ("fields", "text", "accepted"),
    [
        ({}, f"[{RAIN}]", True), ({}, f"[{RAIN}, {FIND}, {PLAN}]", True),
        ({"parallel": False}, f"[{FIND}]", True), ({"parallel": False}, f"[{FIND}, {FIND}]", False),
        ({"only": "plan"}, f"[{PLAN}]", True), ({"only": "plan"}, f"[{RAIN}]", False),
        ({"tools": (NESTED,)}, f"[{PLAN}]", True), ({}, "[]", False), ({}, RAIN, False), ({}, "It rains.", False),
        ({}, '[{"name": "find", "parameters": {}}]', False), ({}, '[{"name": "get_weather", "parameters": {}}]', False),
        ({}, '[{"name": "search", "parameters": 3}]', False),
        ({}, f"[{PLAN.replace('Bergen', 'Rome')}]", False), ({"only": "plan"}, f"[{PLAN.replace('at', 'in')}]", False),
    ],
)  # fmt: skip
def test_only_calls_match(
    tokenizer: PromptTokenizer, compiler: GrammarCompiler, fields: dict[str, Any], text: str, accepted: bool
) -> None:
    """Of tools that are offered, with what their schemas ask for; references inside a schema stay its own.

    docs/api.md
    """
    use = ToolUse(**{"tools": EVERY, "must_call": True, **fields})
    matcher = compiler.compile(llguidance_form(forced_calls(use)))
    ids = tokenizer.encode(text, b"r" * 16).token_ids.tolist()
    assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) == accepted
