"""Checkpoints with chat templates and special tokens in the style of three tool-calling families."""

import json
import shutil
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from tests.serve_app.tokenization.variants import variant_of

TEMPLATES = Path(__file__).parent
FAMILIES = {"hermes": "hermes", "llama3": "llama3_json", "mistral": "mistral"}
"""Template -> its parser. Another one, ``thinking``, has calls in Hermes' format, and drops thoughts."""

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
    "thinking": [],
    "mistral": [AddedToken(word, special=True) for word in ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")],
}


def family(name: str, source: Path, target: Path) -> Path:
    """Copy a checkpoint, with a family's template and tokens."""

    def add_tokens(tokenizer: Tokenizer) -> None:
        for token in _TOKENS[name]:
            (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])

    shutil.copy(TEMPLATES / f"{name}.jinja", variant_of(source, target, add_tokens) / "chat_template.jinja")
    return target


def without_tools(source: Path, target: Path) -> Path:
    """Copy a checkpoint, with a template that writes contents alone."""
    template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    (variant_of(source, target) / "chat_template.jinja").write_text(template)
    return target


def call_text(name: str, arguments: dict[str, Any], family: str) -> str:
    """Return a call as a model of the family writes it."""
    key = "parameters" if family == "llama3" else "arguments"
    call = json.dumps({"name": name, key: arguments})
    return {"hermes": f"<tool_call>\n{call}\n</tool_call>", "llama3": call, "mistral": f"[TOOL_CALLS][{call}]"}[family]
