"""The items of a conversation: their conversion to a model's messages, their stored form, and their list."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from serve_app.api.json_body import JsonBody, call_id
from serve_app.api.openai.messages import joined
from serve_app.api.openai.tools import called, check_arguments
from serve_app.api.request import reasoning_fields
from serve_app.errors import InvalidRequest

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXTS = ("input_text", "output_text", "text")
_PART_FIELDS = frozenset({"type", "text", "annotations", "logprobs", "prompt_cache_breakpoint"})
_ITEM_FIELDS = {
    "message": frozenset({"type", "id", "status", "role", "content", "phase"}),
    "function_call": frozenset({"type", "id", "status", "call_id", "name", "namespace", "arguments"}),
    "function_call_output": frozenset({"type", "id", "status", "call_id", "output"}),
    "reasoning": frozenset({"content"}),
}
ITEM_PATHS = tuple(f"input[].{name}" for name in sorted(frozenset().union(*_ITEM_FIELDS.values())))
"""The paths of all fields that are read."""


def messages_of(items: list[Any], ignored: set[str], first: int = 0) -> list[dict[str, Any]]:
    """Convert input items to messages; consecutive calls, and calls after a text, form one assistant's turn.

    ``first``: the first item's number in errors. Adds the paths of unread fields to ``ignored``.
    Raises InvalidRequest for items that are not text.
    """
    messages: list[dict[str, Any]] = []
    check_arguments(items)
    reasoning = ""
    for index, item in enumerate(items, first):
        path = f"input[{index}]"
        if not isinstance(item, dict):
            raise InvalidRequest(f"{path} must be an object: a message, or a call's.", param=path)
        kind = item.get("type") or "message"
        if kind == "reasoning":
            reasoning += joined(item.get("content") or [], f"{path}.content", ignored, kinds=("reasoning_text",))
            continue
        if not isinstance(kind, str) or kind not in _ITEM_FIELDS:
            stored = "; send the item itself, or use previous_response_id" if kind == "item_reference" else ""
            raise InvalidRequest(f"{path} must be one of {', '.join(_ITEM_FIELDS)}{stored}.", param=path)
        ignored.update(f"input[].{name}" for name in item.keys() - _ITEM_FIELDS[kind] if item[name] not in (None, []))
        if kind == "function_call":
            function = called(item, path, ignored)
            if (space := item.get("namespace")) is not None:
                function["name"] = f"{call_id(space, f'{path}.namespace')}.{function['name']}"
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
        if reasoning and messages[-1]["role"] == "assistant":
            messages[-1].update(reasoning_fields(messages[-1].get("reasoning", "") + reasoning))
        reasoning = ""
    return messages


def _text(content: Any, path: str, ignored: set[str]) -> str:
    return content if isinstance(content, str) else joined(content, path, ignored, kinds=_TEXTS, fields=_PART_FIELDS)


def stored_items(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return valid items with an id each and only the fields that are read, without calls that were cut off."""
    whole = (item for item in items if (item.get("type"), item.get("status")) != ("function_call", "incomplete"))
    return [_stored(item) for item in whole]


def _stored_part(part: Mapping[str, Any]) -> dict[str, Any]:
    refused = part["type"] == "refusal"
    return {"type": "refusal", "refusal": part["refusal"]} if refused else text_part(part["type"], part["text"])


def _stored(item: Mapping[str, Any]) -> dict[str, Any]:
    kind = item.get("type") or "message"
    fields = {name: item[name] for name in _ITEM_FIELDS[kind] if item.get(name) is not None}
    for name in ("content", "output"):
        if isinstance(fields.get(name), list):
            fields[name] = [_stored_part(part) for part in fields[name]]
    if kind == "message" and isinstance(fields["content"], str):
        said = "output_text" if fields["role"] == "assistant" else "input_text"
        fields["content"] = [text_part(said, fields["content"])]
    if kind == "reasoning":
        fields["summary"] = []
    return {**fields, "id": f"{kind}_{secrets.token_hex(16)}", "type": kind, "status": "completed"}


def text_part(kind: str, text: str, told: Sequence[Any] = ()) -> dict[str, Any]:
    """Return a part of a message; ``told``: the log-probabilities of an answer's part."""
    return {"type": kind, "text": text, **({"annotations": [], "logprobs": told} if kind == "output_text" else {})}


class ItemsQuery(JsonBody):
    """The query of ``GET /v1/responses/ID/input_items``."""

    order: Literal["asc", "desc"] = "desc"
    limit: Annotated[int, Field(ge=1, le=100, strict=False)] = 20
    after: str | None = None


def item_page(items: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the page of items that a query selects. Raises InvalidRequest."""
    asked = ItemsQuery.checked(dict(query))
    listed = list(items) if asked.order == "asc" else [*reversed(items)]
    if asked.after is not None:
        ids = [item["id"] for item in listed]
        if asked.after not in ids:
            raise InvalidRequest("after must be the id of one of the response's input items.", param="after")
        listed = listed[ids.index(asked.after) + 1 :]
    page = listed[: asked.limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return {"object": "list", "data": page, "has_more": len(listed) > len(page), "first_id": first, "last_id": last}
