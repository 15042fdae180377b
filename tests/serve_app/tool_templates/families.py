"""Checkpoints whose chat templates and special tokens are in the style of three families that call tools."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

TEMPLATES = Path(__file__).parent
FAMILIES = {"hermes": "hermes", "llama3": "llama3_json", "mistral": "mistral"}
"""Template -> the parser that it asks for."""

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
SEARCH: dict[str, Any] = {"type": "function", "function": {"name": "search"}}

_TOKENS = {
    "hermes": [AddedToken("<tool_call>"), AddedToken("</tool_call>")],
    "llama3": [AddedToken("<|python_tag|>", special=True)],
    "mistral": [AddedToken(word, special=True) for word in ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")],
}


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    for weights in source.glob("*.safetensors"):
        (target / weights.name).symlink_to(weights)


def family(name: str, source: Path, target: Path) -> Path:
    """Copy a checkpoint, with a family's template and tokens."""
    _copy(source, target)
    shutil.copy(TEMPLATES / f"{name}.jinja", target / "chat_template.jinja")
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    for token in _TOKENS[name]:
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
    tokenizer.save(str(target / "tokenizer.json"))
    return target


def without_tools(source: Path, target: Path) -> Path:
    """Copy a checkpoint, with a template that writes contents alone."""
    _copy(source, target)
    (target / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}\n{% endfor %}")
    return target


def call_text(name: str, arguments: dict[str, Any], family: str) -> str:
    """How a model of the family writes a call."""
    key = "parameters" if family == "llama3" else "arguments"
    call = json.dumps({"name": name, key: arguments})
    return {"hermes": f"<tool_call>\n{call}\n</tool_call>", "llama3": call, "mistral": f"[TOOL_CALLS][{call}]"}[family]
