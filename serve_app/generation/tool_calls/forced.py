"""The grammar of answers that must call: a JSON list of calls, with arguments by the tools' schemas. Source: vLLM."""

from __future__ import annotations

from typing import Any

from serve_app.api.tool_calls import Tool, ToolUse
from serve_app.structured.grammar import Grammar

_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""llguidance's: where any white space may come, a model that is forced to call can go on with it for ever."""


def forced_calls(use: ToolUse) -> Grammar:
    """Return what an answer that must call has to match. Raises InvalidRequest where the tools are too large."""
    tools = [tool for tool in use.tools if not use.only or tool["function"]["name"] == use.only]
    one = len(tools) == 1
    calls = [_call(tool, "#/items" if one else f"#/items/anyOf/{index}") for index, tool in enumerate(tools)]
    items = calls[0] if one else {"anyOf": calls}
    schema = {"x-guidance": _LAYOUT, "type": "array", "items": items, "minItems": 1}
    return Grammar.json_schema(schema if use.parallel else {**schema, "maxItems": 1}, "tools")


def _call(tool: Tool, place: str) -> dict[str, Any]:
    """Return the schema of a call; ``place``: where it stands in the whole, for references inside the tool's own."""
    function = tool["function"]
    parameters = _moved(function.get("parameters", {}), f"{place}/properties/parameters")
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "parameters": {**parameters, "type": "object"}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str) -> Any:
    """Return a schema whose references into itself are right at another place of a whole."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: place + part[1:] if name == "$ref" and isinstance(part, str) and part[:1] == "#" else _moved(part, place)
        for name, part in schema.items()
    }
