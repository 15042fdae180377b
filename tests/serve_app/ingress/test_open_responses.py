"""Responses by the schemas of Open Responses' OpenAPI file, which the package `llm-comply` brings along.

OpenAI's own types make nearly every field optional, and so notice none that is missing.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import llm_comply
import pytest
from llm_comply.schema import SpecLoader

from serve_app.stored import open_database
from tests.serve_app.ingress.scripted import BOUNDS, Script, scripted
from tests.serve_app.tool_templates.families import SEARCH, WEATHER, call_text, family

SPECIFICATION = SpecLoader(str(Path(llm_comply.__file__).parent / "specs/openresponses.json"))
TOOLS = [{"type": "function", **tool["function"]} for tool in (WEATHER, SEARCH)]
CALL = call_text("get_weather", {"city": "Oslo"}, "hermes")
FORCED = '[{"name": "get_weather", "parameters": {"city": "Oslo"}}]'
NAMED = {"type": "function", "name": "get_weather"}
ASKED = {
    "text": ("It rains.", {}),
    "every field": (
        "It rains.",
        {
            "instructions": "Be brief.", "metadata": {"a": "b"}, "max_output_tokens": 50, "max_tool_calls": 3,
            "presence_penalty": 0.5, "frequency_penalty": -0.5, "temperature": 0, "top_p": 0.5, "user": "u",
            "safety_identifier": "s", "prompt_cache_key": "k", "reasoning": {"effort": "low", "summary": "auto"},
            "service_tier": "flex", "text": {"format": {"type": "text"}, "verbosity": "low"},
            "include": ["message.output_text.logprobs"], "top_logprobs": 2,
        },
    ),
    "call": ("Let me look. " + CALL, {"tools": TOOLS}),
    "required": (FORCED, {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}),
    "named": (FORCED, {"tools": TOOLS, "tool_choice": NAMED}),
    "allowed": (CALL, {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [NAMED]}}),
    "json": ('{"a": 1}', {"text": {"format": {"type": "json_object"}}}),
}  # fmt: skip
"""What the model writes, and what a request has beside its input."""


@pytest.fixture(scope="module")
def served(demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, Script]]:
    folder = tmp_path_factory.mktemp("open")
    path = family("hermes", demo_model_path, folder / "hermes")
    store = open_database(None, folder / "responses.sqlite", BOUNDS)
    with scripted(path, backend=store) as (url, script), httpx.Client(base_url=url) as http:
        yield http, script


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def wrong(response: dict[str, Any]) -> list[str]:
    return SPECIFICATION.validate(response, "ResponseResource")


def wrong_in(events: list[dict[str, Any]]) -> list[str]:
    assert events
    return [
        f"{each['type']}: {said}" for each in events for said in SPECIFICATION.validate_sse_event(each["type"], each)
    ]


@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize("kind", ASKED)
def test_whole_streamed_and_stored_responses_have_all_that_the_specification_wants(
    kind: str, reason: Any, served: tuple[httpx.Client, Script]
) -> None:
    """The object, each event, the object within events, and a stored one as object and as events."""
    http, script = served
    script.clear()
    text, fields = ASKED[kind]
    script.text, script.reason = text if reason == "stop" else text[: len(text) * 2 // 3], reason
    asked = {"model": "demo", "input": "Rain?", **fields}
    told = http.post("/v1/responses", json=asked)
    assert told.status_code == 200, told.text
    whole = told.json()
    assert wrong(whole) == []
    ended = whole["status"] == "completed"
    assert ended == (reason == "stop")
    assert isinstance(whole["completed_at"], int) == ended
    assert not ended or whole["completed_at"] >= whole["created_at"]
    events = events_of(http.post("/v1/responses", json={**asked, "stream": True}).text)
    assert wrong_in(events) == []
    assert events[0]["response"]["completed_at"] is None
    assert whole.keys() == events[-1]["response"].keys()
    assert wrong(http.get(f"/v1/responses/{whole['id']}").json()) == []
    assert wrong_in(events_of(http.get(f"/v1/responses/{whole['id']}?stream=true").text)) == []


def test_a_response_repeats_what_was_asked(served: tuple[httpx.Client, Script]) -> None:
    """Also what changes nothing here."""
    http, script = served
    script.clear()
    script.text, fields = ASKED["every field"]
    told = http.post("/v1/responses", json={"model": "demo", "input": "Rain?", **fields}).json()
    assert {name: told[name] for name in fields if name != "include"} == {
        name: value for name, value in fields.items() if name != "include"
    }


def test_a_response_that_an_older_release_stored_has_the_newer_fields(served: tuple[httpx.Client, Script]) -> None:
    """They are null, or what they were then."""
    from serve_app.api.openai.responses.response import complete

    http, script = served
    script.clear()
    script.text = "It rains."
    whole = http.post("/v1/responses", json={"model": "demo", "input": "Rain?"}).json()
    old = {name: value for name, value in whole.items() if name not in ("completed_at", "max_tool_calls")}
    assert wrong(old) != [] and wrong(complete(old)) == []
    assert complete(whole) == whole
