"""Tools over a real socket with the real OpenAI client: the model's text is given, all else is what is served."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.serve_app.ingress.scripted import Script, scripted
from tests.serve_app.tool_templates.families import FAMILIES, SEARCH, WEATHER, call_text, family, without_tools

ASKED: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Rain in Oslo?"}]}
ARGUMENTS = {"city": "Oslo ☂", "days": 2}


@dataclass
class Served:
    name: str
    client: OpenAI
    script: Script

    def call(self, name: str = "get_weather", arguments: dict[str, Any] = ARGUMENTS) -> str:
        return call_text(name, arguments, self.name)


@pytest.fixture(scope="module", params=FAMILIES)
def served(
    request: pytest.FixtureRequest, demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    path = family(request.param, demo_model_path, tmp_path_factory.mktemp("families") / request.param)
    with scripted(path) as (url, script), OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
        yield Served(request.param, client, script)


@pytest.fixture(autouse=True)
def new_script(request: pytest.FixtureRequest) -> None:
    if "served" in request.fixturenames:
        request.getfixturevalue("served").script.clear()


def test_a_call_is_what_the_client_reads(served: Served) -> None:
    """Content null, the arguments as they were written, an id, and the reason."""
    served.script.text = served.call()
    choice = served.client.chat.completions.create(**ASKED, tools=[WEATHER]).choices[0]
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", ARGUMENTS)
    if served.name == "mistral":
        assert len(call.id) == 9
        assert call.id.isalnum()
    else:
        assert call.id.startswith("call_")


@pytest.mark.parametrize("step", [1, 4, 1000])
def test_a_streamed_call_adds_up_to_the_whole(served: Served, step: int) -> None:
    """The client's own accumulation finds text, call and reason; the name comes first, arguments in parts."""
    before = "" if served.name == "llama3" else "Let me look."
    served.script.text, served.script.step = before + served.call(), step
    with served.client.chat.completions.stream(**ASKED, tools=[WEATHER]) as stream:
        chunks = [event.chunk for event in stream if event.type == "chunk"]
        choice = stream.get_final_completion().choices[0]
    assert (choice.message.content or "", choice.finish_reason) == (before, "tool_calls")
    (call,) = choice.message.tool_calls or []
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", ARGUMENTS)
    deltas = [delta for chunk in chunks if chunk.choices for delta in chunk.choices[0].delta.tool_calls or []]
    assert {delta.index for delta in deltas} == {0}
    first, *rest = deltas
    assert first.function is not None
    assert (first.id, first.type, first.function.name, first.function.arguments) == (
        call.id, "function", "get_weather", "",
    )  # fmt: skip
    assert all(delta.id is None and delta.function is not None and delta.function.name is None for delta in rest)
    assert (len(rest) > 3) == (step < 1000)


def test_several_calls_have_indices_and_ids(served: Served) -> None:
    """One after the other, streamed too."""
    one, two = served.call(), served.call("search", {})
    joint = {"hermes": "\n", "llama3": "; ", "mistral": ""}[served.name]
    served.script.text = one + joint + two
    whole = served.client.chat.completions.create(**ASKED, tools=[WEATHER, SEARCH]).choices[0].message
    with served.client.chat.completions.stream(**ASKED, tools=[WEATHER, SEARCH]) as stream:
        streamed = stream.get_final_completion().choices[0].message
    for message in (whole, streamed):
        calls = message.tool_calls or []
        assert [call.function.name for call in calls] == ["get_weather", "search"]
        assert len({call.id for call in calls}) == 2
        assert not message.content


def test_without_parallel_calls_the_answer_ends_with_the_first(served: Served) -> None:
    """The generation is ended there."""
    served.script.text, served.script.step = served.call() + served.call("search", {}) + " and so on" * 50, 1
    cancelled = served.script.cancelled
    choice = served.client.chat.completions.create(**ASKED, tools=[WEATHER, SEARCH], parallel_tool_calls=False).choices[
        0
    ]
    assert [call.function.name for call in choice.message.tool_calls or []] == ["get_weather"]
    assert choice.finish_reason == "tool_calls"
    assert served.script.cancelled == cancelled + 1


def test_an_answer_without_a_call_is_text(served: Served) -> None:
    """Also with tools; and where none may be called, what looks like a call is text too."""
    served.script.text = "It rains."
    choice = served.client.chat.completions.create(**ASKED, tools=[WEATHER]).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == ("It rains.", None, "stop")
    served.script.text = served.call()
    choice = served.client.chat.completions.create(**ASKED, tools=[WEATHER], tool_choice="none").choices[0]
    assert choice.message.tool_calls is None
    assert "get_weather" in (choice.message.content or "")
    assert "get_weather" in served.script.prompt().split("Rain")[0]


def test_a_call_that_is_cut_off_is_no_call_of_a_whole_answer(served: Served) -> None:
    """Its arguments would not be JSON; a stream has told its beginning already, and says why it ended."""
    served.script.text, served.script.reason = served.call()[:-20], "length"
    choice = served.client.chat.completions.create(**ASKED, tools=[WEATHER]).choices[0]
    assert (choice.message.tool_calls, choice.finish_reason) == (None, "length")
    assert "get_weather" in (choice.message.content or "")
    chunks = list(served.client.chat.completions.create(**ASKED, tools=[WEATHER], stream=True))
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_conversation_goes_on_with_a_result(served: Served) -> None:
    """What the client got it may send back; the model sees call and result."""
    served.script.text = served.call()
    message = served.client.chat.completions.create(**ASKED, tools=[WEATHER]).choices[0].message
    (call,) = message.tool_calls or []
    served.script.text = "It does."
    messages = [
        *ASKED["messages"],
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "Heavy rain."},
    ]
    answer = served.client.chat.completions.create(model="demo", messages=messages, tools=[WEATHER])
    assert answer.choices[0].message.content == "It does."
    assert json.dumps(ARGUMENTS, ensure_ascii=False) in served.script.prompt()
    assert "Heavy rain." in served.script.prompt()


def test_equal_tools_share_placement_and_saves(served: Served) -> None:
    """The formatted beginning with tools is the key, whoever asks what; other tools are another."""

    def key(question: str, tools: list[Any]) -> bytes:
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
        served.script.text = "Yes."
        body = {"save_system_prompt_kv_cache": True}
        served.client.chat.completions.create(model="demo", messages=messages, tools=tools, extra_body=body)
        generation = served.script.asked[-1]
        (save,) = generation.saves
        assert save.tokens > 30
        return generation.placement_key

    assert key("Rain?", [WEATHER]) == key("Snow?", [json.loads(json.dumps(WEATHER))])
    assert key("Rain?", [WEATHER]) != key("Rain?", [WEATHER, SEARCH])


def test_special_tokens_of_calls_are_hidden_where_there_are_no_tools(served: Served) -> None:
    """As before there were tools."""
    served.script.text = "<|python_tag|>[TOOL_CALLS]x"
    special = {"hermes": served.script.text, "llama3": "[TOOL_CALLS]x", "mistral": "<|python_tag|>x"}
    assert served.client.chat.completions.create(**ASKED).choices[0].message.content == special[served.name]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "search"}}])
def test_an_answer_that_must_call_is_read_by_its_grammar(served: Served, choice: Any) -> None:
    """In whatever format the model's own calls are."""
    parallel = choice == "required"
    calls = [{"name": "get_weather", "parameters": ARGUMENTS}, {"name": "search", "parameters": {}}]
    served.script.text = json.dumps(calls if parallel else calls[1:])
    fields: dict[str, Any] = {**ASKED, "tools": [WEATHER, SEARCH], "tool_choice": choice}
    whole = served.client.chat.completions.create(**fields).choices[0]
    assert json.loads(served.script.asked[-1].grammar)
    with served.client.chat.completions.stream(**fields) as stream:
        streamed = stream.get_final_completion().choices[0]
    for found in (whole, streamed):
        assert found.finish_reason == "tool_calls"
        assert not found.message.content
        named = [call.function.name for call in found.message.tool_calls or []]
        assert named == (["get_weather", "search"] if parallel else ["search"])


def test_a_model_whose_template_ignores_tools_says_so(demo_model_path: Path, tmp_path: Path) -> None:
    """A 400, unless none is to be called: then there is nothing to ignore."""
    path = without_tools(demo_model_path, tmp_path / "model")
    with scripted(path) as (url, script), OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match="chat template ignores tools"):
            client.chat.completions.create(**ASKED, tools=[WEATHER])
        script.text = "Hello"
        answer = client.chat.completions.create(**ASKED, tools=[WEATHER], tool_choice="none")
        assert answer.choices[0].message.content == "Hello"
        assert "get_weather" not in script.prompt()
