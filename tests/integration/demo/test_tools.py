"""Tools by the OpenAI client against a real instance: its random model writes calls only because a grammar says so."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from openai import OpenAI
from openai.types.responses import ResponseFunctionToolCall

pytestmark = pytest.mark.integration

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Bergen"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
ASKED: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Rain?"}],
    "seed": 3,
    "max_tokens": 200,
}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
TEXT_OF_A_CALL = (
    r'Well: <tool_call>\{"name": "get_weather", "arguments": \{"city": "(Oslo|Bergen)", "days": [1-9]\}\}</tool_call>'
)


def check(arguments: str) -> None:
    found = json.loads(arguments)
    assert found["city"] in ("Oslo", "Bergen")
    assert 1 <= found["days"] <= 9


def test_an_answer_that_must_call_calls(client: OpenAI) -> None:
    """By name, whole and streamed; the arguments follow the schema."""
    choice = client.chat.completions.create(**ASKED, tools=[WEATHER], tool_choice=NAMED).choices[0]
    (call,) = choice.message.tool_calls or []
    check(call.function.arguments)  # type: ignore[union-attr]
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    with client.chat.completions.stream(
        **ASKED, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False
    ) as stream:
        (same,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert same.function.arguments == call.function.arguments  # type: ignore[union-attr]


def test_a_call_in_the_models_own_words_is_read(client: OpenAI) -> None:
    """The text is forced; that there is a call in it is found by the parser of the model's family."""
    regex = {"structured_outputs": {"regex": TEXT_OF_A_CALL}}
    with client.chat.completions.stream(**ASKED, tools=[WEATHER], extra_body=regex) as stream:
        deltas = [event.chunk.choices[0].delta for event in stream if event.type == "chunk" and event.chunk.choices]
        choice = stream.get_final_completion().choices[0]
    (call,) = choice.message.tool_calls or []
    assert (choice.message.content, choice.finish_reason) == ("Well: ", "tool_calls")
    check(call.function.arguments)  # type: ignore[union-attr]
    assert sum(delta.tool_calls is not None for delta in deltas) > 3
    plain = client.chat.completions.create(**ASKED, extra_body=regex).choices[0].message
    assert re.fullmatch(TEXT_OF_A_CALL, plain.content or "")


def test_tools_are_part_of_the_prefix(client: OpenAI) -> None:
    """The second of two conversations with equal tools finds them cached."""
    tools = [{**WEATHER, "function": {**WEATHER["function"], "description": "Looks out of the window. " * 40}}]
    asked = [{**ASKED, "messages": [{"role": "user", "content": word}], "max_tokens": 1} for word in ("Rain?", "Snow?")]
    body: dict[str, Any] = {"extra_body": {"save_system_prompt_kv_cache": True}}
    usages = [client.chat.completions.create(**fields, tools=tools, **body).usage for fields in asked]
    cached = [usage.prompt_tokens_details.cached_tokens for usage in usages if usage and usage.prompt_tokens_details]
    assert cached[1] is not None
    assert cached[1] > 100


def test_responses(client: OpenAI) -> None:
    """Text, JSON by a schema, a call and its result, on the same instance."""
    text = client.responses.create(model="demo", input="Rain?", max_output_tokens=8)
    assert text.usage is not None
    assert text.usage.output_tokens <= 8
    form: Any = {"format": {"type": "json_schema", "name": "it", "schema": PARAMETERS}}
    given = client.responses.create(model="demo", input="Rain?", text=form, max_output_tokens=400, temperature=0)
    check(given.output_text)
    tool: Any = {"type": "function", "strict": True, **WEATHER["function"]}
    fields: dict[str, Any] = {
        "model": "demo",
        "tools": [tool],
        "tool_choice": {"type": "function", "name": "get_weather"},
    }
    with client.responses.stream(**fields, input="Rain?") as stream:
        (call,) = stream.get_final_response().output
    assert isinstance(call, ResponseFunctionToolCall)
    check(call.arguments)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Heavy rain."}
    items: Any = [{"role": "user", "content": "Rain?"}, call, result]
    last = client.responses.create(model="demo", input=items, tools=[tool], max_output_tokens=4)
    assert last.status in ("completed", "incomplete")
