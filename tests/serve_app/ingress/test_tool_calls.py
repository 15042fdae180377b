"""Tools over a real socket with the real OpenAI client: only the model's text is scripted."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.serve_app.ingress.apis import CHAT, MESSAGES, RESPONSES, Clients, clients_of
from tests.serve_app.ingress.scripted import Script, scripted
from tests.serve_app.tool_templates.families import FAMILIES, SEARCH, WEATHER, call_text, family, without_tools

RAIN = CHAT.user("Rain in Oslo?")
ASKED: dict[str, Any] = {"model": "demo", **RAIN}
ARGUMENTS = {"city": "Oslo ☂", "days": 2}


@dataclass
class Served:
    name: str
    clients: Clients
    script: Script

    def call(self, name: str = "get_weather", arguments: dict[str, Any] = ARGUMENTS) -> str:
        return call_text(name, arguments, self.name)

    def ask(self, text: str, **fields: Any) -> Any:
        """Return the choice of an answer with this model text."""
        self.script.text = text
        return self.clients.openai.chat.completions.create(**{**ASKED, **fields}).choices[0]

    def stream(self, text: str, **fields: Any) -> tuple[Any, list[Any]]:
        """Return the same choice as the client assembles it, and the chunks."""
        self.script.text = text
        with self.clients.openai.chat.completions.stream(**{**ASKED, **fields}) as stream:
            chunks = [event.chunk for event in stream if event.type == "chunk"]
            return stream.get_final_completion().choices[0], chunks


@pytest.fixture(scope="module", params=FAMILIES)
def family_served(
    request: pytest.FixtureRequest, demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    path = family(request.param, demo_model_path, tmp_path_factory.mktemp("families") / request.param)
    with scripted(path) as (url, script), clients_of(url) as clients:
        yield Served(request.param, clients, script)


@pytest.fixture
def served(family_served: Served) -> Served:
    family_served.script.clear()
    return family_served


@pytest.mark.parametrize("step", [1, 1000])
def test_the_client_reads_calls(served: Served, step: int) -> None:
    """A stream adds up to the whole: a call's name is sent first, then its arguments verbatim in parts."""
    before, joint = "" if served.name == "llama3" else "Let me look.", {"hermes": "\n", "llama3": "; ", "mistral": ""}
    text, tools = before + served.call() + joint[served.name] + served.call("search", {}), [WEATHER, SEARCH]
    served.script.step = step
    streamed, chunks = served.stream(text, tools=tools)
    for choice in (served.ask(text, tools=tools), streamed):
        assert (choice.message.content or "", choice.finish_reason) == (before, "tool_calls")
        calls = choice.message.tool_calls or []
        assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
            ("get_weather", ARGUMENTS), ("search", {}),
        ]  # fmt: skip
        ids = {call.id for call in calls}
        assert len(ids) == 2
        assert all(len(i) == 9 and i.isalnum() if served.name == "mistral" else i.startswith("call_") for i in ids)
    deltas = [delta for chunk in chunks if chunk.choices for delta in chunk.choices[0].delta.tool_calls or []]
    first, *rest = [delta for delta in deltas if delta.index == 0]
    assert (first.type, first.function.name, first.function.arguments) == ("function", "get_weather", "")
    assert all(delta.id is None and delta.function.name is None for delta in rest)
    assert (len(rest) > 3) == (step < 1000)


def test_without_parallel_calls_the_answer_ends_with_the_first(served: Served) -> None:
    """The generation ends there."""
    served.script.step, cancelled = 1, served.script.cancelled
    text = served.call() + served.call("search", {}) + " and so on" * 50
    choice = served.ask(text, tools=[WEATHER, SEARCH], parallel_tool_calls=False)
    assert [call.function.name for call in choice.message.tool_calls] == ["get_weather"]
    assert choice.finish_reason == "tool_calls"
    assert served.script.cancelled == cancelled + 1


def test_without_permission_to_call_a_call_is_text(served: Served) -> None:
    """Without tools, the special tokens of calls are hidden."""
    choice = served.ask(served.call(), tools=[WEATHER], tool_choice="none")
    assert choice.message.tool_calls is None and "get_weather" in choice.message.content
    assert "get_weather" in served.script.prompt().split("Rain")[0]
    hidden = {"hermes": "<|python_tag|>[TOOL_CALLS]x", "llama3": "[TOOL_CALLS]x", "mistral": "<|python_tag|>x"}
    assert served.ask("<|python_tag|>[TOOL_CALLS]x").message.content == hidden[served.name]


@pytest.mark.parametrize("step", [1, 1000])
def test_only_an_allowed_tool_is_called(served: Served, step: int) -> None:
    """The model sees all tools, so that the prompt is the same; its call of another one is text, nothing is lost."""
    tools, served.script.step = [WEATHER, SEARCH], step
    named = [{"type": "function", "function": {"name": "get_weather"}}]
    choice: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": named}}
    other = served.call("search", {"query": "sun"})
    joint = {"hermes": "\n", "llama3": "; ", "mistral": ""}[served.name]
    served.ask("", tools=tools)
    prompt = served.script.prompt()
    for text, called in ((served.call() + joint + other, ["get_weather"]), (other, [])):
        streamed, _ = served.stream(text, tools=tools, tool_choice=choice)
        for answer in (served.ask(text, tools=tools, tool_choice=choice), streamed):
            assert served.script.prompt() == prompt
            assert [call.function.name for call in answer.message.tool_calls or []] == called
            assert answer.finish_reason == ("tool_calls" if called else "stop")
            assert "search" in answer.message.content and "sun" in answer.message.content
            assert "Oslo" not in answer.message.content


@pytest.mark.parametrize("step", [1, 1000])
def test_a_call_that_is_cut_off_is_told_as_far_as_it_came(served: Served, step: int) -> None:
    """Whole and streamed, by the length or a stop string; the reason tells that it is not complete. (docs: api)"""
    served.script.step = step
    before = "" if served.name == "llama3" else "Let me look."
    text = before + served.call(arguments={"city": "Oslo", "days": 2})
    for fields in ({}, {"parallel_tool_calls": False}, {"stop": ["2"]}):
        cut, reason = (text, "stop") if "stop" in fields else (text[: text.index("Oslo") + 2], "length")
        served.script.reason = reason  # type: ignore[assignment]
        served.script.text = cut
        for ask in (CHAT.whole, CHAT.streamed):
            answer = ask(served.clients, **RAIN, tools=[WEATHER], **fields)
            arguments = '{"city": "Oslo", "days": ' if "stop" in fields else '{"city": "Os'
            assert (answer.text, answer.ended, answer.calls) == (before, reason, [("get_weather", arguments)])


@pytest.mark.parametrize("step", [1, 1000])
def test_a_forced_call_that_is_cut_off_leaves_none_of_its_form_in_the_content(served: Served, step: int) -> None:
    """The list that the grammar forces is no text, wherever it is cut: in the first call, or behind it."""
    text = json.dumps([{"name": "get_weather", "parameters": {"city": "Oslo"}}] * 2)
    behind, first = text.index("}}") + 2, text.index("Os") + 2
    told: dict[int, list[str]] = {
        1: [],
        12: [],
        first: ['{"city": "Os'],
        behind: ['{"city": "Oslo"}'],
        behind + 20: ['{"city": "Oslo"}'],
    }
    fields: dict[str, Any] = {"tools": [WEATHER], "tool_choice": "required"}
    served.script.step, served.script.reason = step, "length"
    for at, arguments in told.items():
        served.script.text = text[:at]
        for ask in (CHAT.whole, CHAT.streamed):
            answer = ask(served.clients, **RAIN, **fields)
            assert (answer.text, answer.ended, [said for _, said in answer.calls]) == ("", "length", arguments)
    served.script.text, served.script.reason = text[:first], "stop"  # a token that the request wants to stop at
    for ask in (CHAT.whole, CHAT.streamed):
        answer = ask(served.clients, **RAIN, **fields)
        assert ([said for _, said in answer.calls], answer.text) == (['{"city": "Os'], "")


def test_a_conversation_goes_on_with_a_result(served: Served) -> None:
    """The client may send back everything it got; the model sees call and result."""
    message = served.ask(served.call(), tools=[WEATHER]).message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Heavy rain."}
    messages = [*ASKED["messages"], message.model_dump(exclude_none=True), result]
    assert served.ask("It does.", messages=messages, tools=[WEATHER]).message.content == "It does."
    assert json.dumps(ARGUMENTS, ensure_ascii=False) in served.script.prompt()
    assert "Heavy rain." in served.script.prompt()


def test_equal_tools_share_placement_and_saves(served: Served) -> None:
    """The key is the formatted prefix with tools, for any question; other tools give another key."""

    def key(question: str, tools: list[Any]) -> bytes:
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
        served.ask("Yes.", messages=messages, tools=tools, extra_body={"save_system_prompt_kv_cache": True})
        generation = served.script.asked[-1]
        (save,) = generation.saves
        assert save.tokens > 30
        return generation.placement_key

    assert key("Rain?", [WEATHER]) == key("Snow?", [json.loads(json.dumps(WEATHER))])
    assert key("Rain?", [WEATHER]) != key("Rain?", [WEATHER, SEARCH])


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "search"}}])
def test_an_answer_that_must_call_is_read_by_its_grammar(served: Served, choice: Any) -> None:
    """This holds for any format of the model's own calls."""
    calls = [{"name": "get_weather", "parameters": ARGUMENTS}, {"name": "search", "parameters": {}}]
    calls = calls if choice == "required" else calls[1:]
    fields: dict[str, Any] = {"tools": [WEATHER, SEARCH], "tool_choice": choice}
    whole = served.ask(json.dumps(calls), **fields)
    assert json.loads(served.script.asked[-1].grammar)
    for found in (whole, served.stream(json.dumps(calls), **fields)[0]):
        assert (found.finish_reason, found.message.content or "") == ("tool_calls", "")
        assert [call.function.name for call in found.message.tool_calls] == [call["name"] for call in calls]


def test_tools_are_told_where_the_template_has_none(demo_model_path: Path, tmp_path: Path) -> None:
    """In a system message behind the client's own, with a warning; calls are forced, or read as that message says.

    docs: api
    """
    path = without_tools(demo_model_path, tmp_path / "model")
    with scripted(path) as (url, script), clients_of(url) as clients:
        served, client = Served("hermes", clients, script), clients.openai
        system, user = {"role": "system", "content": "Be brief."}, ASKED["messages"][0]
        asked: dict[str, Any] = {"tools": [WEATHER, SEARCH], "messages": [system, user]}
        forced = json.dumps([{"name": "get_weather", "parameters": ARGUMENTS}])
        for text, choice in ((served.call(), "auto"), (forced, "required")):
            found, (streamed, _) = (
                served.ask(text, **asked, tool_choice=choice), served.stream(text, **asked, tool_choice=choice),
            )  # fmt: skip
            for each in (found, streamed):
                (call,) = each.message.tool_calls
                assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", ARGUMENTS)
                assert (each.message.content or "", each.finish_reason) == ("", "tool_calls")
            prompt = script.prompt()
            places = [prompt.index(word) for word in ("Be brief.", "The weather of a city.", "search", "Rain in Oslo?")]
            assert places == sorted(places)
        script.text = forced
        for api in (RESPONSES, MESSAGES):
            assert api.whole(clients, **api.tools(choice="required")).parts == ["call"]
            assert "has no tools" in api.post(url, **api.tools(choice="required")).headers["x-warmpath-warning"]
        raw = client.chat.completions.with_raw_response.create(**{**ASKED, **asked})
        assert "has no tools" in raw.headers["x-warmpath-warning"]
        raw = client.chat.completions.with_raw_response.create(**ASKED)
        assert "x-warmpath-warning" not in raw.headers
        # what it called goes back in the same form, and a prompt without permission to call is the same
        result = {"role": "tool", "tool_call_id": call.id, "content": "Heavy rain."}
        turn = [system, user, found.message.model_dump(exclude_none=True), result]
        assert served.ask("It does.", **{**asked, "messages": turn}).message.content == "It does."
        assert script.prompt().startswith(prompt.removesuffix("\n"))
        assert "<tool_call>" in script.prompt().split("Rain in Oslo?")[1] and "Heavy rain." in script.prompt()
        assert served.ask("Hello", **asked, tool_choice="none").message.content == "Hello"
        assert script.prompt() == prompt
