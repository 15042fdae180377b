"""OpenAI's responses over a real socket with the real client; the model's text is scripted."""

import json
from typing import Any

import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseFunctionToolCall

from tests.serve_app.ingress.scripted import Script
from tests.serve_app.tool_templates.families import WEATHER, call_text

ASKED: dict[str, Any] = {"model": "demo", "input": "Rain?"}
TOOL: dict[str, Any] = {"type": "function", "strict": False, **WEATHER["function"]}
CALL = call_text("get_weather", {"city": "Oslo"}, "hermes")


def test_a_response_has_every_field(client: OpenAI, script: Script) -> None:
    """Every field of the SDK's type is there and strictly typed."""
    script.text = "It rains."
    raw = client.responses.with_raw_response.create(
        **ASKED, instructions="Be brief.", metadata={"a": "b"}, max_output_tokens=50
    )
    response = Response.model_validate_json(raw.content, strict=True)
    assert (response.metadata, response.max_output_tokens, response.instructions) == ({"a": "b"}, 50, "Be brief.")
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert json.loads(raw.content)["store"] is False


@pytest.mark.parametrize("step", [1, 1000])
def test_events_come_in_openais_order_and_add_up_to_the_whole(client: OpenAI, script: Script, step: int) -> None:
    """Text and then a call are numbered, each item is opened and closed, and the whole response is at the end."""
    script.text, script.step = "Let me look. " + CALL, step
    events = list(client.responses.create(**ASKED, tools=[TOOL], stream=True))
    kinds = [event.type for event in events]
    text, arguments = "response.output_text.delta", "response.function_call_arguments.delta"
    shortened = [kind for at, kind in enumerate(kinds) if not (kind in (text, arguments) and kinds[at - 1] == kind)]
    assert shortened == [
        "response.created", "response.in_progress",
        "response.output_item.added", "response.content_part.added", text, "response.output_text.done",
        "response.content_part.done", "response.output_item.done",
        "response.output_item.added", arguments, "response.function_call_arguments.done", "response.output_item.done",
        "response.completed",
    ]  # fmt: skip
    assert (kinds.count(text) > 1, kinds.count(arguments) > 1) == (step == 1, step == 1)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for event in events:
        type(event).model_validate(event.to_dict(mode="json"), strict=True)
    final = events[-1].response
    assert {event.item_id for event in events if hasattr(event, "item_id")} == {item.id for item in final.output}
    whole = client.responses.create(**ASKED, tools=[TOOL])
    with client.responses.stream(**ASKED, tools=[TOOL]) as stream:
        built = stream.get_final_response()
    for response in (whole, built, final):
        message, call = response.output
        assert (response.output_text, message.status) == ("Let me look. ", "completed")
        assert isinstance(call, ResponseFunctionToolCall)
        assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Oslo"})
        assert call.call_id.startswith("call_")


def test_a_call_of_a_namespace_is_told_by_both_names(client: OpenAI, script: Script) -> None:
    """Whole and streamed, it has Codex's form; the prompt has one name for it, and an answer repeats the tools."""
    inner = {name: value for name, value in TOOL.items() if name != "strict"}
    space: Any = {"type": "namespace", "name": "sky", "description": "Above.", "tools": [inner]}
    script.text = call_text("sky.get_weather", {"city": "Oslo"}, "hermes")
    *_, last = client.responses.create(**ASKED, tools=[space, {"type": "web_search"}], stream=True)
    for response in (client.responses.create(**ASKED, tools=[space, {"type": "web_search"}]), last.response):
        (call,) = response.output
        assert isinstance(call, ResponseFunctionToolCall)
        assert (call.namespace, call.name, json.loads(call.arguments)) == ("sky", "get_weather", {"city": "Oslo"})
        assert [tool.type for tool in response.tools] == ["namespace", "web_search"]
    assert '"name": "sky.get_weather"' in script.prompt()


def test_an_answer_tells_why_the_cache_was_missed_if_requested(client: OpenAI, script: Script) -> None:
    """The reason is in usage, whole and streamed; it is absent without the field, and after a hit."""
    script.text = "Yes."
    rest = "Answer in whole sentences, and name the paragraph of the terms that you rest on. " * 12
    asked: dict[str, Any] = {"model": "demo", "extra_body": {"cache_diagnostics": True}}
    streamed: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    create: Any = client.chat.completions.create

    def messages(day: int) -> list[Any]:
        return [{"role": "system", "content": f"Today is 2026-11-{day}. {rest}"}, {"role": "user", "content": "Hi"}]

    def told(answer: Any) -> tuple[str, str]:
        usage = answer.model_dump()["usage"]
        details = usage["input_tokens_details" if "input_tokens" in usage else "prompt_tokens_details"]
        return details["cache_miss"]["reason"], details["cache_miss"]["first_difference"]["found"]

    silent = create(model="demo", messages=messages(11))
    short = create(messages=[{"role": "user", "content": "Hi"}], **asked)
    for answer in (silent, short):
        assert "cache_miss" not in answer.model_dump()["usage"]["prompt_tokens_details"]
    assert told(create(messages=messages(12), **asked)) == ("time", "2026-11-12")
    assert told(list(create(messages=messages(13), **streamed, **asked))[-1]) == ("time", "2026-11-13")
    response = client.responses.create(input="Hi", instructions=messages(14)[0]["content"], **asked)
    assert told(response) == ("time", "2026-11-14")


def test_only_an_allowed_tool_is_called(client: OpenAI, script: Script) -> None:
    """A choice names functions, also those of a namespace; the prompt is the same, and a call of another is text."""
    search: Any = {"type": "function", "name": "search", "strict": False, "parameters": {"type": "object"}}
    space: Any = {"type": "namespace", "name": "sky", "description": "Weather", "tools": [search]}
    asked: Any = {**ASKED, "tools": [TOOL, space]}
    client.responses.create(**asked)
    prompt = script.prompt()
    look, other = CALL, call_text("sky.search", {"query": "sun"}, "hermes")
    for named, called in (
        ({"type": "function", "name": "get_weather"}, [None]),
        ({"type": "namespace", "name": "sky"}, ["sky"]),
        ({"type": "function", "namespace": "sky", "name": "search"}, ["sky"]),
        ({"type": "web_search"}, []),
    ):
        script.text = look + "\n" + other
        choice: Any = {"type": "allowed_tools", "mode": "auto", "tools": [named]}
        answer = client.responses.create(**asked, tool_choice=choice).to_dict()
        assert script.prompt() == prompt
        calls: Any = [item for item in answer["output"] if item["type"] == "function_call"]  # type: ignore[attr-defined]
        assert [call.get("namespace") for call in calls] == called
        assert answer["tool_choice"] == choice
