"""Every type of OpenAI's and Anthropic's own packages is taken, or refused by a name that the reference lists."""

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import anthropic.types as messages
import anthropic.types.beta as beta
import openai.types.chat as chat
import openai.types.responses as responses
import pytest
from openai.types.responses.response_create_params import ToolChoice

from serve_app.api.anthropic.request import parse_messages
from serve_app.api.as_text import MEDIA
from serve_app.api.json_body import KINDS, Kinds
from serve_app.api.openai.request import parse_chat
from serve_app.api.openai.responses.request import parse_response_request
from serve_app.api.request import ChatRequest
from serve_app.errors import InvalidRequest
from tests.serve_app.api.sdk_types import examples, fields, items, names

_DATE = re.compile(r"_\d{8}$|_\d{4}_\d{2}_\d{2}$")
USER = {"role": "user", "content": "Hi"}
CHAT_TOOL = {"type": "function", "function": {"name": "x"}}
RESPONSE_TOOL = {"type": "function", "name": "x"}
NAMED_FUNCTION = {"type": "function", "function": {"name": "x"}}
NAMED = {"type": "function", "name": "x"}
MESSAGE_TOOL = {"name": "x", "input_schema": {"type": "object"}}


class Place(NamedTuple):
    """A place in a body: its types as our table has them, and as the packages have them; a body with one of them."""

    listed: str
    types: Any
    parse: Callable[[bytes], ChatRequest]
    body: Callable[[Any], dict[str, Any]]


def _content(typed: Any) -> Any:
    return fields(typed)["content"]


def in_chat(**given: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [USER], **given}


def in_message(**given: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 1, "messages": [USER], **given}


def in_response(**given: Any) -> dict[str, Any]:
    return {"model": "m", "input": "Hi", **given}


def _said_in(body: Callable[..., dict[str, Any]], field: str, least: dict[str, Any], content: Any) -> dict[str, Any]:
    """Return a body whose last message has the content."""
    return body(**{field: [USER, {**least, "content": content}]})


def _with_tools(choice: Any, tool: dict[str, Any]) -> Any:
    """Return a choice with the tool in its list, for which the packages have no type."""
    if not isinstance(choice, dict):
        return choice
    return {name: [tool] if name == "tools" else _with_tools(value, tool) for name, value in choice.items()}


def _places() -> Iterator[tuple[str, Place]]:
    for role in ("developer", "system", "user", "assistant", "tool"):
        typed = getattr(chat, f"ChatCompletion{role.title()}MessageParam")
        yield f"chat {role}", Place(
            "chat: parts of messages", _content(typed), parse_chat,
            partial(_said_in, in_chat, "messages", next(examples(typed))),
        )  # fmt: skip
    said = chat.ChatCompletionAssistantMessageParam
    yield "chat calls", Place(
        "chat: tool calls", fields(said)["tool_calls"], parse_chat,
        lambda it: in_chat(messages=[USER, {"role": "assistant", "tool_calls": it}]),
    )  # fmt: skip
    yield (
        "chat messages",
        Place("", chat.ChatCompletionMessageParam, parse_chat, lambda it: in_chat(messages=[USER, it])),
    )
    yield (
        "chat tools",
        Place("chat: tools", chat.ChatCompletionToolUnionParam, parse_chat, lambda it: in_chat(tools=[it])),
    )
    yield "chat choices", Place(
        "chat: tool choices", chat.ChatCompletionToolChoiceOptionParam, parse_chat,
        lambda it: in_chat(tools=[CHAT_TOOL], tool_choice=_with_tools(it, NAMED_FUNCTION)),
    )  # fmt: skip
    yield "items", Place(
        "responses: items", responses.ResponseInputItemParam, parse_response_request,
        lambda it: in_response(input=[USER, it]),
    )  # fmt: skip
    for name, typed in (
        ("message", responses.EasyInputMessageParam),
        ("output", responses.ResponseOutputMessageParam),
    ):
        yield f"parts of {name}", Place(
            "responses: parts of items", _content(typed), parse_response_request,
            partial(_said_in, in_response, "input", next(examples(typed))),
        )  # fmt: skip
    yield (
        "response tools",
        Place("responses: tools", responses.ToolParam, parse_response_request, lambda it: in_response(tools=[it])),
    )
    yield "response choices", Place(
        "responses: tool choices", ToolChoice, parse_response_request,
        lambda it: in_response(tools=[RESPONSE_TOOL], tool_choice=_with_tools(it, NAMED)),
    )  # fmt: skip
    for prefix, room in (("", messages), ("Beta", beta)):
        message, tools = getattr(room, f"{prefix}MessageParam"), getattr(room, f"{prefix}ToolUnionParam")
        yield f"{prefix} messages", Place("", message, parse_messages, lambda it: in_message(messages=[USER, it]))
        for role in ("user", "assistant"):
            for typed in items(message):
                if role in fields(typed)["role"].__args__[0].__args__:
                    yield f"{prefix} blocks of {role} in {typed.__name__}", Place(
                        "messages: blocks", _content(typed), parse_messages,
                        partial(_said_in, in_message, "messages", {"role": role}),
                    )  # fmt: skip
        yield f"{prefix} results", Place(
            "messages: blocks", _content(getattr(room, f"{prefix}ToolResultBlockParam")), parse_messages,
            lambda it: in_message(
                messages=[USER, {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "x", "content": it}
                ]}]
            ),
        )  # fmt: skip
        yield f"{prefix} tools", Place("messages: tools", tools, parse_messages, lambda it: in_message(tools=[it]))
        yield f"{prefix} choices", Place(
            "messages: tool choices", getattr(room, f"{prefix}ToolChoiceParam"), parse_messages,
            lambda it: in_message(tools=[MESSAGE_TOOL], tool_choice=it),
        )  # fmt: skip


PLACES = dict(_places())
WRONG_ROLE = re.compile(r"which is for (user|assistant), not|must be from assistant")
REFERENCE = "in no stored response"


@pytest.mark.parametrize("name", [name for name, place in PLACES.items() if place.listed])
def test_the_reference_lists_every_type_of_the_clients_packages(name: str) -> None:
    """A type that a new version of a package brings is named here: add it to the table."""
    place = PLACES[name]
    listed = {kind for kinds in KINDS[place.listed] for kind in kinds}
    of_packages = {_DATE.sub("", kind) for typed in items(place.types) for kind in names(typed)}
    assert of_packages
    assert of_packages - listed == set()


@pytest.mark.parametrize("name", PLACES)
def test_every_type_is_taken_or_refused_by_its_listed_name(name: str) -> None:
    """What is read or shown as text needs no warning; a refusal names a type that is listed as refused."""
    place = PLACES[name]
    kinds = KINDS.get(place.listed, Kinds(()))
    refusals = {*MEDIA, *(kind for listed in KINDS.values() for kind in listed.refused)}
    tried = 0
    for example in examples(place.types):
        tried += 1
        kind = example.get("type") if isinstance(example, dict) else None
        kind = _DATE.sub("", kind) if isinstance(kind, str) else None
        try:
            request = place.parse(json.dumps(place.body(example)).encode())
        except InvalidRequest as error:
            inner = refusals.intersection(re.findall(r"'(\w+)'", error.message))
            of_tool = re.fullmatch(r"tools\[0\](\.tools\[0\])?\.type|tool_choice", error.param or "")
            assert inner or of_tool or WRONG_ROLE.search(error.message) or REFERENCE in error.message, (example, error)
            assert not of_tool or kind in kinds.refused or ".tools" in str(error.param), (example, error)
        else:
            assert kind not in kinds.refused, example
            warned = any(_DATE.sub("", field.name).endswith(f".{kind}") for field in request.unknown)
            assert not warned or kind in kinds.dropped or "encrypted" in json.dumps(example), example
            assert warned or kind not in kinds.dropped
    assert tried
