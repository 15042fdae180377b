"""OpenAI's responses over a real socket with the real client; the model's text is given."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseFunctionToolCall

from serve_app.errors import GenerationFailed
from tests.serve_app.ingress.scripted import Script, scripted
from tests.serve_app.tool_templates.families import WEATHER, call_text, family

TOOL: dict[str, Any] = {"type": "function", "strict": False, **WEATHER["function"]}
CALL = call_text("get_weather", {"city": "Oslo"}, "hermes")


@pytest.fixture(scope="module")
def served(demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[OpenAI, Script]]:
    path = family("hermes", demo_model_path, tmp_path_factory.mktemp("family") / "hermes")
    with scripted(path) as (url, script), OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
        yield client, script


@pytest.fixture
def client(served: tuple[OpenAI, Script]) -> OpenAI:
    return served[0]


@pytest.fixture
def script(served: tuple[OpenAI, Script]) -> Script:
    served[1].clear()
    return served[1]


def test_text_in_text_out(client: OpenAI, script: Script) -> None:
    """Every field that the SDK's type asks for is there and strictly of its type; usage tells what was cached."""
    script.text = "It rains."
    raw = client.responses.with_raw_response.create(
        model="demo", input="Rain?", instructions="Be brief.", metadata={"a": "b"}, max_output_tokens=50
    )
    response = Response.model_validate_json(raw.content, strict=True)
    assert (response.output_text, response.status, response.instructions) == ("It rains.", "completed", "Be brief.")
    assert (response.metadata, response.max_output_tokens) == ({"a": "b"}, 50)
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens == 16
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert json.loads(raw.content)["store"] is False
    assert "Be brief." in script.prompt()


def test_events_come_in_openais_order(client: OpenAI, script: Script) -> None:
    """Text, then a call: numbered, each item opened and closed, the whole response at the end."""
    script.text = "Let me look. " + CALL
    events = list(client.responses.create(model="demo", input="Rain?", tools=[TOOL], stream=True))
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
    assert kinds.count(text) > 1
    assert kinds.count(arguments) > 1
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for event in events:
        type(event).model_validate(event.to_dict(mode="json"), strict=True)
    final = events[-1].response
    assert [item.type for item in final.output] == ["message", "function_call"]
    assert final.usage is not None
    ids = {item.id for item in final.output}
    assert {event.item_id for event in events if hasattr(event, "item_id")} == ids


@pytest.mark.parametrize("step", [1, 1000])
def test_a_stream_adds_up_to_the_whole(client: OpenAI, script: Script, step: int) -> None:
    """By the SDK's own accumulation."""
    script.text, script.step = "Let me look. " + CALL, step
    whole = client.responses.create(model="demo", input="Rain?", tools=[TOOL])
    with client.responses.stream(model="demo", input="Rain?", tools=[TOOL]) as stream:
        streamed = stream.get_final_response()
    for response in (whole, streamed):
        message, call = response.output
        assert response.output_text == "Let me look. "
        assert message.status == "completed"
        assert isinstance(call, ResponseFunctionToolCall)
        assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Oslo"})
        assert call.call_id.startswith("call_")


def test_a_conversation_goes_on_with_a_result(client: OpenAI, script: Script) -> None:
    """The output of one response is input of the next, as OpenAI's guide does it."""
    script.text = CALL
    first = client.responses.create(model="demo", input="Rain?", tools=[TOOL])
    (call,) = first.output
    assert isinstance(call, ResponseFunctionToolCall)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Heavy rain."}
    script.text = "It does."
    items: list[Any] = [{"role": "user", "content": "Rain?"}, *first.output, result]
    raw = client.responses.with_raw_response.create(model="demo", input=items, tools=[TOOL])
    assert raw.parse().output_text == "It does."
    assert "x-warmpath-warning" not in raw.headers
    assert '{"city": "Oslo"}' in script.prompt()
    assert "Heavy rain." in script.prompt()


def test_an_answer_that_is_cut_off_is_incomplete(client: OpenAI, script: Script) -> None:
    """Whole and streamed, and so is its last item."""
    script.text, script.reason = "It rai", "length"
    whole = client.responses.create(model="demo", input="Rain?")
    *_, last = client.responses.create(model="demo", input="Rain?", stream=True)
    assert last.type == "response.incomplete"
    for response in (whole, last.response):
        assert (response.status, response.output[-1].status) == ("incomplete", "incomplete")
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.output_text == "It rai"


def test_an_answer_without_text_is_an_empty_message(client: OpenAI, script: Script) -> None:
    """Streamed too."""
    script.text = "<|im_end|>"
    whole = client.responses.create(model="demo", input="Rain?")
    with client.responses.stream(model="demo", input="Rain?") as stream:
        streamed = stream.get_final_response()
    for response in (whole, streamed):
        assert [item.type for item in response.output] == ["message"]
        assert response.output_text == ""


def test_errors_are_the_clients(client: OpenAI, script: Script) -> None:
    """Before the first token a status, in mid-stream an event that the SDK raises."""
    with pytest.raises(openai.BadRequestError, match="nothing is stored"):
        client.responses.create(model="demo", input="x", previous_response_id="resp_1")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")
    script.text, script.fails = "It rains all day long", GenerationFailed("The replica died.")
    with pytest.raises(openai.APIError, match="The replica died"):
        list(client.responses.create(model="demo", input="x", stream=True))


def test_an_answer_tells_why_the_cache_was_missed_where_it_is_asked(client: OpenAI, script: Script) -> None:
    """In usage, whole and at a stream's end; without the field nothing is there, nor where it was a hit."""
    script.text = "Yes."
    rest = "Answer in whole sentences, and name the paragraph of the terms that you rest on. " * 12
    asked: dict[str, Any] = {"model": "demo", "extra_body": {"cache_diagnostics": True}}

    def messages(day: int) -> list[Any]:
        return [{"role": "system", "content": f"Today is 2026-11-{day}. {rest}"}, {"role": "user", "content": "Hi"}]

    def told(usage: Any) -> tuple[str, str]:
        details = usage["input_tokens_details" if "input_tokens" in usage else "prompt_tokens_details"]
        return details["cache_miss"]["reason"], details["cache_miss"]["first_difference"]["found"]

    silent = client.chat.completions.create(model="demo", messages=messages(11))
    assert "cache_miss" not in silent.model_dump()["usage"]["prompt_tokens_details"]
    chat = client.chat.completions.create(messages=messages(12), **asked)
    assert told(chat.model_dump()["usage"]) == ("time", "2026-11-12")
    stream = client.chat.completions.create(
        messages=messages(13), stream=True, stream_options={"include_usage": True}, **asked
    )
    *_, last = stream
    assert told(last.model_dump()["usage"]) == ("time", "2026-11-13")
    response = client.responses.create(input="Hi", instructions=messages(14)[0]["content"], **asked)
    assert told(response.model_dump()["usage"]) == ("time", "2026-11-14")
    short = client.chat.completions.create(messages=[{"role": "user", "content": "Hi"}], **asked)
    assert "cache_miss" not in short.model_dump()["usage"]["prompt_tokens_details"]
