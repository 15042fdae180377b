"""The ``input`` of a response -> messages of a chat: text, calls of functions and their results, in turn."""

from __future__ import annotations

from typing import Any

from serve_app.api.json_body import call_id
from serve_app.api.openai.messages import joined
from serve_app.api.openai.tools import called, check_arguments
from serve_app.errors import InvalidRequest

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXTS = ("input_text", "output_text", "text")
_PART_FIELDS = frozenset({"type", "text", "annotations", "logprobs", "prompt_cache_breakpoint"})
_ITEM_FIELDS = {
    "message": frozenset({"type", "id", "status", "role", "content", "phase"}),
    "function_call": frozenset({"type", "id", "status", "call_id", "name", "arguments"}),
    "function_call_output": frozenset({"type", "id", "status", "call_id", "output"}),
}
ITEM_FIELDS = tuple(
    f"input[].{name}" for name in sorted({*_ITEM_FIELDS["function_call"], "role", "content", "output"})
)  # fmt: skip


def messages_of(items: list[Any], ignored: set[str]) -> list[dict[str, Any]]:
    """Return the messages that input items are; calls that follow each other, or a text, are one assistant's turn.

    Adds the paths of fields that nothing reads to ``ignored``. Raises InvalidRequest for items that are no text.
    """
    messages: list[dict[str, Any]] = []
    check_arguments(items)
    for index, item in enumerate(items):
        path = f"input[{index}]"
        if not isinstance(item, dict):
            raise InvalidRequest(f"{path} must be an object: a message, or a call's.", param=path)
        kind = item.get("type") or "message"
        if kind == "reasoning":
            continue  # a client sends back whatever it got; no model here wrote it, and no template has a place for it
        if not isinstance(kind, str) or kind not in _ITEM_FIELDS:
            stored = "; nothing is stored here, so send the item itself" if kind == "item_reference" else ""
            raise InvalidRequest(f"{path} must be one of {', '.join(_ITEM_FIELDS)}{stored}.", param=path)
        ignored.update(f"input[].{name}" for name in item.keys() - _ITEM_FIELDS[kind] if item[name] not in (None, []))
        if kind == "function_call":
            function = called(item, path)
            call = {"type": "function", "function": function, "id": call_id(item.get("call_id"), f"{path}.call_id")}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = _text(item.get("output"), f"{path}.output", ignored)
            answered = call_id(item.get("call_id"), f"{path}.call_id")
            messages.append({"role": "tool", "content": output, "tool_call_id": answered})
        else:
            role = _ROLES.get(str(item.get("role")))
            if role is None:
                raise InvalidRequest(f"{path}.role must be one of {', '.join(_ROLES)}.", param=f"{path}.role")
            messages.append({"role": role, "content": _text(item.get("content"), f"{path}.content", ignored)})
    return messages


def _text(content: Any, path: str, ignored: set[str]) -> str:
    return content if isinstance(content, str) else joined(content, path, ignored, kinds=_TEXTS, fields=_PART_FIELDS)
