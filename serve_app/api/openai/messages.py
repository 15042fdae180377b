"""Convert OpenAI's chat messages to chat-template messages: text, tool calls and their results."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, WithJsonSchema
from typing_extensions import TypedDict

from serve_app.api.json_body import Must, Text1024, refused
from serve_app.api.openai.tools import call_for_template
from serve_app.api.request import reasoning_fields
from serve_app.errors import InvalidRequest

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}

_TEXT_PART: dict[str, Any] = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
TextParts = Annotated[list[Any], WithJsonSchema({"type": "array", "items": _TEXT_PART})]
Reasoning = Annotated[str | None, Must("a string, an assistant's reasoning")]
Unused = Annotated[Any, Field(description="null or an empty list")]


class Message(TypedDict):
    """One message of a chat; only an assistant's content may be absent."""

    # Pydantic makes a TypedDict in a seventh of a model's time, and a long chat has hundreds of messages.
    # It does not keep unknown fields, which would cost a sixth of all parsing: `ignored_in` finds them.
    __pydantic_config__ = ConfigDict(extra="ignore")  # type: ignore[misc]  # pydantic documents this, mypy rejects it

    role: Annotated[Literal["system", "developer", "user", "assistant", "tool"], Must(f"one of {', '.join(_ROLES)}")]
    content: NotRequired[Annotated[str | TextParts | None, Must("a string or a list of text parts")]]
    name: NotRequired[Text1024]
    tool_call_id: NotRequired[Text1024]
    reasoning_content: NotRequired[Reasoning]
    reasoning: NotRequired[Reasoning]
    refusal: NotRequired[Annotated[str | None, Must("a string, an assistant's refusal")]]
    tool_calls: NotRequired[Annotated[list[Any] | None, Must("a list of calls")]]
    function_call: NotRequired[Unused]
    audio: NotRequired[Unused]


_FIELDS = frozenset(Message.__annotations__)
_PART_FIELDS = frozenset({*_TEXT_PART["properties"], "prompt_cache_breakpoint"})
MESSAGE_FIELDS = (
    *(f"messages[].{name}" for name in _FIELDS),
    *(f"messages[].content[].{name}" for name in _TEXT_PART["properties"]),
)
"""Paths of the fields of messages that are read."""


def ignored_in(messages: list[dict[str, Any]]) -> set[str]:
    """Return the paths of unread fields of messages; null and [] do not count."""
    if max(map(len, messages)) <= 2:
        return set()
    given = ((name, value) for message in messages if len(message) > 2 for name, value in message.items())
    return {f"messages[].{name}" for name, value in given if name not in _FIELDS and value not in (None, [])}


def for_template(message: Message, index: int, in_parts: set[str]) -> dict[str, Any]:
    """Return a message with string role and content. Adds unread fields of its parts and calls to ``in_parts``."""
    role, content = message["role"], message.get("content")
    if not isinstance(content, str):
        absent = content is None and role == "assistant"
        content = "" if absent else joined(content, f"messages[{index}].content", in_parts)
    shown: dict[str, Any] = {"role": _ROLES[role], "content": content}
    if len(message) > 2 or "content" not in message:
        for name in ("function_call", "audio"):
            if message.get(name) not in (None, []):
                raise refused(f"messages[{index}].{name}", "tool_calls" if name == "function_call" else "")
        shown |= {name: text for name in ("name", "tool_call_id") if (text := message.get(name)) is not None}
        if role == "assistant":  # what it said instead of a content
            shown["content"] = content + (message.get("refusal") or "")
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if reasoning and role == "assistant":
            shown |= reasoning_fields(reasoning)
        calls = message.get("tool_calls")
        if calls:
            path = f"messages[{index}].tool_calls"
            if role != "assistant":
                raise InvalidRequest(f"{path} is for an assistant's message.", param=path)
            shown["tool_calls"] = [call_for_template(call, f"{path}[{i}]", in_parts) for i, call in enumerate(calls)]
    return shown


def joined(
    parts: list[Any] | None,
    path: str,
    ignored: set[str],
    *,
    kinds: Sequence[str] = ("text",),
    fields: frozenset[str] = _PART_FIELDS,
) -> str:
    """Return the text of a message in parts, joined without a separator. A refusal is text that an assistant said.

    ``kinds``: the accepted types of parts; ``fields``: their fields that are read. ``ignored`` gets paths of others.
    """
    if not isinstance(parts, list):
        raise InvalidRequest(f"{path} must be a string or a list of text parts.", param=path)
    texts: list[str] = []
    for part in parts:
        name = "refusal" if isinstance(part, dict) and part.get("type") == "refusal" else "text"
        if not isinstance(part, dict) or (part.get("type") not in kinds and name == "text"):
            example = f'{{"type": "{kinds[0]}", "text": "..."}}'
            raise InvalidRequest(f"{path} must be text only: a string, or parts like {example}.", param=path)
        if not isinstance(part.get(name), str):
            raise InvalidRequest(f'{path} must be made of parts with a "{name}", a string.', param=path)
        texts.append(part[name])
        if len(part) > 2:
            where = path.partition("[")[0]
            unread = part.keys() - fields - {name}
            ignored.update(f"{where}[].content[].{name}" for name in unread if part[name] not in (None, []))
    return "".join(texts)
