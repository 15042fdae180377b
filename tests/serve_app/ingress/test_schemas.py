"""Schemas over a real socket, on every API: what cannot be followed is told before the answer, or in its header."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve_app.ingress.apis import MESSAGES, Api, every_chat
from tests.serve_app.ingress.scripted import Script, scripted
from tests.serve_app.tool_templates.families import family

ODD = {"type": "object", "properties": {"a": {"not": {"type": "null"}}}}
RECORD = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}}


@pytest.fixture(scope="module")
def served(demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Script]]:
    with scripted(family("hermes", demo_model_path, tmp_path_factory.mktemp("schemas") / "hermes")) as found:
        yield found


@pytest.fixture(scope="module")
def large_served(demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Script]]:
    """Serve a context that has room for large tools."""
    path = family("hermes", demo_model_path, tmp_path_factory.mktemp("large") / "hermes")
    with scripted(path, max_model_len=1 << 21) as found:
        yield found


@pytest.mark.parametrize("stream", [False, True])
@every_chat
def test_a_tool_that_cannot_be_followed_is_named(served: tuple[str, Script], api: Api, stream: bool) -> None:
    """Only a strict one that must be called fails the request.

    docs: api
    """
    url, script = served
    script.text = '[{"name": "f", "parameters": {}}]'

    def post(schema: Any, choice: str, strict: bool | None = None) -> httpx.Response:
        tool = {"name": "f", "parameters": schema, "strict": strict}
        return api.post(url, **api.tools(tool, choice=choice), stream=stream)

    for choice, strict in (("auto", None), ("auto", True)):
        assert post(ODD, choice, strict).status_code == 200
    loosened = post(ODD, "required")
    assert loosened.status_code == 200
    assert loosened.headers["x-warmpath-warning"] == "not enforced: tool f: `not` at #/properties/a"
    refused = post(ODD, "required", True)
    assert refused.status_code == 400 and "tool f: `not` at #/properties/a" in refused.text
    plain = post(RECORD, "required", True)
    assert plain.status_code == 200 and "x-warmpath-warning" not in plain.headers


def large(number: int) -> dict[str, Any]:
    """Return the schema of a tool as editors and MCP servers send it."""
    told = {"description": "What it does, when to use it and what to avoid. " * 6}
    kinds: list[dict[str, Any]] = [
        {"type": "string", "default": "/"},
        {"type": "integer", "minimum": 0, "exclusiveMinimum": number},
        {"type": "string", "enum": ["content", "files_with_matches", "count"]},
        {"type": "array", "items": {"type": "object", "properties": {"path": {"type": "string", **told}}}},
    ]
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {f"option_{at}": {**kinds[at % 4], **told} for at in range(20)},
        "required": ["option_0"],
        "additionalProperties": False,
    }


@pytest.mark.parametrize("choice", ["auto", "required"])
@every_chat
def test_a_hundred_large_tools_are_taken(large_served: tuple[str, Script], api: Api, choice: str) -> None:
    """Only schemas that constrain an answer are bounded, without their descriptions."""
    url, script = large_served
    key = "arguments" if choice == "auto" else "parameters"
    call = json.dumps({"name": "f7", key: {"option_0": "x", "option_3": [{"path": "y"}]}})
    script.text = f"<tool_call>\n{call}\n</tool_call>" if choice == "auto" else f"[{call}]"
    several = [{"name": f"f{at}", "description": "Does it. " * 300, "parameters": large(at)} for at in range(100)]
    answer = api.post(url, **api.tools(*several, choice=choice))
    assert answer.status_code == 200
    assert '"f7"' in answer.text and "x-warmpath-warning" not in answer.headers


@pytest.mark.parametrize("stream", [False, True])
@every_chat
def test_a_format_that_cannot_be_followed_is_refused(served: tuple[str, Script], api: Api, stream: bool) -> None:
    """Alternatives that overlap are allowed with a warning, unless they are strict.

    docs: api
    """
    url, script = served
    script.text = "5"

    def post(schema: Any, **more: Any) -> httpx.Response:
        form = {"type": "json_schema", "name": "n", "schema": schema, **more}
        return api.post(url, **api.format(form), stream=stream)

    loop = {"type": "object", "patternProperties": {"a$": {"$ref": "#"}}, "required": ["a"]}
    for schema, said in ((ODD, "`not` at #/properties/a"), (loop, "`patternProperties`")):
        refused = post(schema)
        assert refused.status_code == 400 and said in refused.text
    either = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    assert post(either).headers["x-warmpath-warning"] == "not enforced: `oneOf` at #"
    if api is not MESSAGES:
        assert post(either, strict=True).status_code == 400
