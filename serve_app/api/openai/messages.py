"""Convert OpenAI's chat messages to chat-template messages: text, tool calls and their results."""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, WithJsonSchema
from typing_extensions import TypedDict

from serve_app.api.as_text import MEDIA, as_text
from serve_app.api.json_body import CHAT_PARTS, Kinds, Must, Text1024, call_id
from serve_app.api.openai.caching import MARK
from serve_app.api.openai.tools import MAX_ARGUMENT_DEPTH, call_for_template
from serve_app.api.request import reasoning_fields
from serve_app.errors import InvalidRequest

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_TEXT_FIELDS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "reasoning_text": "text",
    "summary_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""The field that holds the text, for each type of a part that is text in any API."""

_TEXT_PART: dict[str, Any] = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
TextParts = Annotated[list[Any], WithJsonSchema({"type": "array", "items": _TEXT_PART})]
Reasoning = Annotated[str | None, Must("a string, an assistant's reasoning")]


class Message(TypedDict):
    """One message of a chat; the content of an assistant and of a tool may be absent."""

    # Pydantic makes a TypedDict in a seventh of a model's time, and a long chat has hundreds of messages.
    # It does not keep unknown fields, which would cost a sixth of all parsing: `ignored_in` finds them.
    __pydantic_config__ = ConfigDict(extra="ignore")  # type: ignore[misc]  # pydantic documents this, mypy rejects it

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool", "function"], Must(f"one of {', '.join(_ROLES)}")
    ]
    content: NotRequired[Annotated[str | TextParts | None, Must("a string or a list of text parts")]]
    name: NotRequired[Text1024]
    tool_call_id: NotRequired[Text1024]
    reasoning_content: NotRequired[Reasoning]
    reasoning: NotRequired[Reasoning]
    refusal: NotRequired[Annotated[str | None, Must("a string, an assistant's refusal")]]
    tool_calls: NotRequired[Annotated[list[Any] | None, Must("a list of calls")]]
    function_call: NotRequired[Annotated[dict[str, Any] | list[Any] | None, Must("an object with name and arguments")]]


_FIELDS = frozenset(Message.__annotations__)
_PART_FIELDS = frozenset(_TEXT_PART["properties"])
MESSAGE_FIELDS = (
    *(f"messages[].{name}" for name in _FIELDS),
    *(f"messages[].content[].{name}" for name in _TEXT_PART["properties"]),
)
"""Paths of the fields of messages that are read."""


_OF_ROLES = {
    "reasoning": ("assistant",), "reasoning_content": ("assistant",), "refusal": ("assistant",),
    "tool_call_id": ("tool", "function"),
}  # fmt: skip
"""Fields that are read in messages of these roles alone."""


def ignored_in(messages: list[dict[str, Any]]) -> set[str]:
    """Return the paths of unread fields of messages; null and [] do not count."""
    if max(map(len, messages)) <= 2:
        return set()
    given = ((name, value) for message in messages if len(message) > 2 for name, value in message.items())
    return {f"messages[].{name}" for name, value in given if name not in _FIELDS and value not in (None, [])}


def for_template(message: Message, index: int, in_parts: set[str]) -> dict[str, Any]:
    """Return a message with string role and content. Adds unread fields of its parts and calls to ``in_parts``."""
    role, content = message["role"], message.get("content")
    thoughts: list[str] | None = [] if role == "assistant" else None
    if not isinstance(content, str):
        absent = content is None and role in ("assistant", "tool", "function")
        content = "" if absent else joined(content, f"messages[{index}].content", in_parts, thoughts)
    written: dict[str, Any] = {"role": _ROLES[role], "content": content}
    if len(message) > 2 or "content" not in message or thoughts or role == "function":
        if (name := message.get("name")) is not None:
            written["name"] = name
        unread = (field for field, roles in _OF_ROLES.items() if role not in roles and message.get(field))
        in_parts.update(f"messages[].{field}" for field in unread)
        if message.get("tool_call_id"):
            written["tool_call_id"] = call_id(message["tool_call_id"], f"messages[{index}].tool_call_id")
        if role == "function":
            written["tool_call_id"] = f"call_{message.get('name')}"
        if role == "assistant":  # what it said instead of a content
            written["content"] = content + (message.get("refusal") or "")
        reasoning = message.get("reasoning_content") or message.get("reasoning") or "".join(thoughts or ())
        if reasoning and role == "assistant":
            written |= reasoning_fields(reasoning)
        path = f"messages[{index}].tool_calls"
        calls = [(f"{path}[{i}]", call) for i, call in enumerate(message.get("tool_calls") or ())]
        if function := message.get("function_call"):  # OpenAI's older form, without ids
            path = f"messages[{index}].function_call"
            name = function.get("name") if isinstance(function, dict) else None
            calls.append((path, {"function": function, "id": f"call_{name}"}))
        if calls:
            if role != "assistant":
                raise InvalidRequest(f"{path} is for an assistant's message.", param=path)
            written["tool_calls"] = [call_for_template(call, where, in_parts) for where, call in calls]
    return written


def joined(
    parts: list[Any] | None,
    path: str,
    ignored: set[str],
    thoughts: list[str] | None = None,
    *,
    kinds: Kinds = CHAT_PARTS,
    fields: frozenset[str] = _PART_FIELDS,
    depth: int = MAX_ARGUMENT_DEPTH,
) -> str:
    """Return the text of a message in parts, joined without a separator. A refusal is text that an assistant said.

    ``thoughts`` gets an assistant's reasoning; None: it is text. ``fields``: the fields of parts that are read.
    ``ignored`` gets the paths of others. Other parts become text, or are refused by ``as_text``.
    """
    if not isinstance(parts, list):
        raise InvalidRequest(f"{path} must be a string or a list of text parts.", param=path)
    texts: list[str] = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type", "text") if isinstance(part, dict) else None
        name = _TEXT_FIELDS.get(kind) if isinstance(kind, str) else None
        if name is None:
            if not isinstance(kind, str) or kind in MEDIA:
                example = f'{{"type": "{kinds.read[0]}", "text": "..."}}'
                said = f"a string, or parts like {example}; {str(kind)[:64]!r} is not read here"
                raise InvalidRequest(f"{path} must be text only: {said}.", param=path)
            where = f"{path.partition('[')[0]}[].content[]"
            texts.append(as_text(part, path, where, kinds, ignored))
            ignored.update({f"{where}.{MARK}"} if part.get(MARK) is not None else ())
            continue
        text = part.get(name)
        if isinstance(text, list) and kind == "thinking":
            if not depth:
                raise InvalidRequest(f"{path} must be nested at most {MAX_ARGUMENT_DEPTH} deep.", param=path)
            text = joined(text, path, ignored, depth=depth - 1)
        if not isinstance(text, str):
            raise InvalidRequest(f'{path} must be made of parts with a "{name}", a string.', param=path)
        (texts if thoughts is None or kind != "thinking" else thoughts).append(text)
        if len(part) > 2:
            where = path.partition("[")[0]
            unread = part.keys() - fields - {name}
            ignored.update(f"{where}[].content[].{name}" for name in unread if part[name] not in (None, []))
    return "".join(texts)
