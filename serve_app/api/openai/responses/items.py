"""The items of a conversation as they are stored with a response, go on to the next one, and are listed."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from serve_app.errors import InvalidRequest, NotFound

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
_READ = ("role", "content", "call_id", "name", "arguments", "output")
_MAX_ID_CHARS = 128
_PAGE = 20
_MAX_PAGE = 100


def stored_items(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return valid items with what is read of them alone, and an id each; a call that was cut off is left out."""
    made = secrets.token_hex(16)
    cut = ("function_call", "incomplete")
    whole = (item for item in items if (item.get("type"), item.get("status")) != cut)
    return [_stored(item, f"{made}_{number}") for number, item in enumerate(whole)]


def _stored(item: Mapping[str, Any], made_id: str) -> dict[str, Any]:
    kind, given = item.get("type") or "message", item.get("id")
    text = "output_text" if item.get("role") == "assistant" else "input_text"
    read = {name: item[name] for name in _READ if item.get(name) is not None}
    for name in ("content", "output"):
        if isinstance(read.get(name), list):
            read[name] = [_part(part["type"], part["text"]) for part in read[name]]
    if kind == "message" and isinstance(read["content"], str):
        read["content"] = [_part(text, read["content"])]
    if kind == "reasoning":
        read = {"summary": [], "content": read.get("content", [])}
    known = isinstance(given, str) and 0 < len(given) <= _MAX_ID_CHARS
    return {"id": given if known else f"{_PREFIXES[kind]}_{made_id}", "type": kind, "status": "completed", **read}


def _part(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, "text": text, **({"annotations": [], "logprobs": []} if kind == "output_text" else {})}


def item_page(items: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return a page of items, as ``after``, ``limit`` and ``order`` of a query ask for it. Raises InvalidRequest."""
    order, limit, after = query.get("order", "desc"), query.get("limit", str(_PAGE)), query.get("after")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc.", param="order")
    if not (limit.isdecimal() and len(limit) < 4 and 1 <= int(limit) <= _MAX_PAGE):
        raise InvalidRequest(f"limit must be a whole number from 1 to {_MAX_PAGE}.", param="limit")
    listed = list(items) if order == "asc" else [*reversed(items)]
    if after is not None:
        ids = [item["id"] for item in listed]
        if after not in ids:
            raise InvalidRequest("after must be the id of one of the response's input items.", param="after")
        listed = listed[ids.index(after) + 1 :]
    page = listed[: int(limit)]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": page, "has_more": len(listed) > len(page), **ends}


def response_not_found(response_id: str) -> NotFound:
    """Return the error for a response that its tenant has not."""
    return NotFound(f"There is no stored response {response_id[:64]!r}: it may be deleted, or over its time.")


def previous_not_found(response_id: str) -> InvalidRequest:
    """Return the error for a conversation that cannot go on."""
    return InvalidRequest(
        f"There is no stored response {response_id[:64]!r} to go on with: it may be deleted, or over its time; send "
        "the whole conversation.",
        param="previous_response_id",
        code="previous_response_not_found",
    )
