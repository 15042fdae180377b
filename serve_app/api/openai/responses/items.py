"""The items of a conversation: their conversion to a model's messages, their stored form, and their list."""

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from serve_app.api.as_text import as_text
from serve_app.api.json_body import RESPONSE_ITEMS, RESPONSE_PARTS, JsonBody, call_id
from serve_app.api.openai.messages import joined
from serve_app.api.openai.tools import called, check_arguments, with_input
from serve_app.api.request import reasoning_fields
from serve_app.errors import InvalidRequest

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_PART_FIELDS = frozenset({"type", "text", "logprobs"})
_ITEM_FIELDS = {
    "message": frozenset({"type", "id", "status", "role", "content", "phase"}),
    "function_call": frozenset({"type", "id", "status", "call_id", "name", "namespace", "arguments", "caller"}),
    "function_call_output": frozenset({"type", "id", "status", "call_id", "output", "name", "namespace", "caller"}),
    "custom_tool_call": frozenset({"type", "id", "status", "call_id", "name", "namespace", "input", "caller"}),
    "custom_tool_call_output": frozenset({"type", "id", "status", "call_id", "output", "name", "namespace", "caller"}),
    "reasoning": frozenset({"type", "id", "status", "content", "summary"}),
}
_CALLS = ("function_call", "custom_tool_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_OUTPUT_ID = re.compile(r"[a-z]{2,3}_([0-9a-f]{32})_\d{1,4}")
"""The id of an item in an answer; it has the answer's id."""
ITEM_PATHS = tuple(f"input[].{name}" for name in sorted(frozenset().union(*_ITEM_FIELDS.values())))
"""The paths of all fields that are read."""


def messages_of(items: list[Any], ignored: set[str], first: int = 0) -> list[dict[str, Any]]:
    """Convert input items to messages; an assistant's text and calls between two results form one turn.

    ``first``: the first item's number in errors. Adds the paths of unread fields to ``ignored``. Items of tools that
    ran elsewhere become text. Raises InvalidRequest for items that hold none.
    """
    turns = _Turns()
    check_arguments(items)
    reasoning = ""
    for index, item in enumerate(items, first):
        path = f"input[{index}]"
        if not isinstance(item, dict):
            raise InvalidRequest(f"{path} must be an object: a message, or a call's.", param=path)
        kind = kind_of(item)
        if kind == "reasoning":
            ignored.update(_unread(item, kind))  # also what only another server can decrypt
            told = item.get("content") or item.get("summary") or []
            reasoning += joined(told, f"{path}.content", ignored, kinds=RESPONSE_PARTS)
            continue
        if kind in _CALLS:
            if turns.role != "assistant":
                turns.add({"role": "assistant", "content": ""})
            turns.call(_call(item, kind, path, ignored))
        elif (said := _said(item, kind, path, ignored)) is not None:
            if reasoning and said["role"] != "assistant":  # it was cut off before it said anything
                turns.add({"role": "assistant", "content": "", **reasoning_fields(reasoning)})
                reasoning = ""
            if said["role"] == "tool" and "tool_call_id" not in said:
                said = _answering(said, _full_name(item), turns.last_call)
            if said["role"] == "assistant" and turns.calls:
                turns.texts.append(said["content"])
            else:
                turns.add(said)
        if reasoning and turns.role == "assistant":
            turns.thoughts.append(reasoning)
            reasoning = ""
    if reasoning:
        turns.add({"role": "assistant", "content": "", **reasoning_fields(reasoning)})
    turns.join()
    return turns.messages


class _Turns:
    """Messages so far. What the last one gains is joined once: piece by piece would copy the earlier ones each time."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.texts: list[str] = []
        self.thoughts: list[str] = []
        self.last_call: Mapping[str, Any] | None = None

    @property
    def role(self) -> str:
        """The role of the last message, "" for none."""
        return str(self.messages[-1]["role"]) if self.messages else ""

    @property
    def calls(self) -> bool:
        """Whether the last message calls tools."""
        return bool(self.messages) and "tool_calls" in self.messages[-1]

    def add(self, message: dict[str, Any]) -> None:
        """Begin a message."""
        self.join()
        self.messages.append(message)

    def call(self, call: dict[str, Any]) -> None:
        """Add a call to the last message."""
        self.messages[-1].setdefault("tool_calls", []).append(call)
        self.last_call = call

    def join(self) -> None:
        """Put what was gained into the last message."""
        if self.texts:
            self.messages[-1]["content"] += "".join(self.texts)
            self.texts.clear()
        if self.thoughts:
            thought = self.messages[-1].get("reasoning", "") + "".join(self.thoughts)
            self.messages[-1].update(reasoning_fields(thought))
            self.thoughts.clear()


def _answering(said: dict[str, Any], name: str, call: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return an output without a call's id as the last call's, or as a user's words if it has another name.

    Codex tells a goal in such an item.
    """
    if name and (call is None or call["function"]["name"] != name):
        return {"role": "user", "content": f"{name}: {said['content']}"}
    return {**said, "tool_call_id": call["id"]} if call is not None else said


def _full_name(item: Mapping[str, Any]) -> str:
    """Return the name of an item's function, with its namespace, "" for none."""
    names = (item.get("namespace"), item.get("name"))
    return ".".join(name for name in names if isinstance(name, str) and name)


def kind_of(item: Mapping[str, Any]) -> Any:
    """Return an item's type; messages and references may omit it."""
    return item.get("type") or ("item_reference" if "id" in item and "role" not in item else "message")


def answer_of(item: Any) -> str:
    """Return the id of the response of ours whose output a reference names, "" for any other item."""
    if not isinstance(item, dict) or kind_of(item) != "item_reference":
        return ""
    found = _OUTPUT_ID.fullmatch(str(item.get("id")))
    return f"resp_{found[1]}" if found else ""


def _call(item: dict[str, Any], kind: str, path: str, ignored: set[str]) -> dict[str, Any]:
    ignored.update(_unread(item, kind))
    function = called(item if kind == "function_call" else with_input(item), path, ignored)
    if (space := item.get("namespace")) is not None:
        function["name"] = f"{call_id(space, f'{path}.namespace')}.{function['name']}"
    return {"type": "function", "function": function, "id": call_id(item.get("call_id"), f"{path}.call_id")}


def _said(item: dict[str, Any], kind: Any, path: str, ignored: set[str]) -> dict[str, Any] | None:
    """Return the message of an item, None if it says nothing."""
    if kind == "item_reference":
        stored = "an item that is in no stored response; send the item itself, or use previous_response_id"
        raise InvalidRequest(f"{path} refers to {stored}.", param=path)
    if kind == "message":
        ignored.update(_unread(item, kind))
        role = _ROLES.get(str(item.get("role")))
        if role is None:
            raise InvalidRequest(f"{path}.role must be one of {', '.join(_ROLES)}.", param=f"{path}.role")
        return {"role": role, "content": _text(item.get("content"), f"{path}.content", ignored)}
    if kind in _OUTPUTS:
        ignored.update(_unread(item, kind))
        answered = {"role": "tool", "content": _text(item.get("output"), f"{path}.output", ignored)}
        if item.get("call_id") is not None:
            answered["tool_call_id"] = call_id(item["call_id"], f"{path}.call_id")
        return answered
    text = as_text(item, path, "input[]", RESPONSE_ITEMS, ignored)
    by_user = kind.endswith("_output") or kind == "mcp_approval_response"
    role = _ROLES.get(str(item.get("role")), "user" if by_user else "assistant")
    return {"role": role, "content": text} if text else None


def _unread(item: Mapping[str, Any], kind: str) -> Iterator[str]:
    """Yield the paths of an item's fields that are not read; null and [] do not count."""
    return (f"input[].{name}" for name in item.keys() - _ITEM_FIELDS[kind] if item[name] not in (None, []))


def _text(content: Any, path: str, ignored: set[str]) -> str:
    if isinstance(content, str):
        return content
    return joined(content, path, ignored, kinds=RESPONSE_PARTS, fields=_PART_FIELDS)


def stored_items(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return valid items with an id each and only the fields that are read, without calls that were cut off."""
    whole = (item for item in items if (item.get("type"), item.get("status")) != ("function_call", "incomplete"))
    return [_stored(item) for item in whole]


def _stored_part(part: Any) -> Any:
    match part:
        case {"type": "refusal", "refusal": said}:
            return {"type": "refusal", "refusal": said}
        case {"type": kind, "text": str(text)}:
            return text_part(kind, text)
    return part


def _stored(item: Mapping[str, Any]) -> dict[str, Any]:
    kind = kind_of(item)
    fields = {name: item[name] for name in _ITEM_FIELDS.get(kind, item) if item.get(name) is not None}
    if kind in _ITEM_FIELDS:
        for name in ("content", "output"):
            if isinstance(fields.get(name), list):
                fields[name] = [_stored_part(part) for part in fields[name]]
    if kind == "message" and isinstance(fields["content"], str):
        said = "output_text" if fields["role"] == "assistant" else "input_text"
        fields["content"] = [text_part(said, fields["content"])]
    if kind == "reasoning":
        fields.setdefault("summary", [])
    return {**fields, "id": f"{kind}_{secrets.token_hex(16)}", "type": kind, "status": "completed"}


def text_part(kind: str, text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    """Return a part of a message; ``logprobs``: the log-probabilities of an answer's part."""
    return {"type": kind, "text": text, **({"annotations": [], "logprobs": logprobs} if kind == "output_text" else {})}


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
