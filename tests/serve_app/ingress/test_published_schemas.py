"""Answers by the schemas of Open Responses, OpenAI and Anthropic: the files that the package `llm-comply` brings along.

The types of OpenAI's own client make nearly every field optional, and so notice none that is missing.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import llm_comply
import pytest
from llm_comply.schema import SpecLoader

from serve_app.errors import GenerationFailed
from serve_app.stored.url import open_database
from tests.serve_app.ingress.scripted import BOUNDS, Script, scripted
from tests.serve_app.tool_templates.families import SEARCH, WEATHER, call_text, family

SPECIFICATION, OPENAI, ANTHROPIC = (
    SpecLoader(str(Path(llm_comply.__file__).parent / f"specs/{name}.json"))
    for name in ("openresponses", "openai_chat", "anthropic")
)
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


def test_an_error_in_a_stream_is_the_specifications_event(served: tuple[httpx.Client, Script]) -> None:
    http, script = served
    script.clear()
    script.text, script.fails = "It rains.", GenerationFailed("The engine is gone.")
    *before, last = events_of(http.post("/v1/responses", json={"model": "demo", "input": "Rain?", "stream": True}).text)
    assert wrong_in([*before, last]) == []
    assert last["type"] == "error"


MESSAGE = {"model": "demo", "max_tokens": 50, "messages": [{"role": "user", "content": "Rain?"}]}
MESSAGE_EVENTS = {
    "message_start": "MessageStartEvent", "message_delta": "MessageDeltaEvent", "message_stop": "MessageStopEvent",
    "content_block_start": "ContentBlockStartEvent", "content_block_delta": "ContentBlockDeltaEvent",
    "content_block_stop": "ContentBlockStopEvent",
}  # fmt: skip


@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize("text", ["It rains.", "Let me look. " + CALL])
def test_messages_and_their_events_have_all_that_anthropics_schemas_want(
    text: str, reason: Any, served: tuple[httpx.Client, Script]
) -> None:
    http, script = served
    script.clear()
    script.text, script.reason = text if reason == "stop" else text[: len(text) * 2 // 3], reason
    tools = [{"name": "get_weather", "input_schema": {"type": "object"}}]
    asked = {**MESSAGE, "tools": tools}
    assert ANTHROPIC.validate(http.post("/v1/messages", json=asked).json(), "Message") == []
    events = events_of(http.post("/v1/messages", json={**asked, "stream": True}).text)
    assert {"message_start", "content_block_delta", "message_delta"} <= {each["type"] for each in events}
    assert [said for each in events for said in ANTHROPIC.validate(each, MESSAGE_EVENTS[each["type"]])] == []


def test_other_answers_of_anthropics_api_have_all_that_its_schemas_want(served: tuple[httpx.Client, Script]) -> None:
    http, _ = served
    count = {name: value for name, value in MESSAGE.items() if name != "max_tokens"}
    assert (
        ANTHROPIC.validate(http.post("/v1/messages/count_tokens", json=count).json(), "CountMessageTokensResponse")
        == []
    )
    (model,) = http.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()["data"]
    assert ANTHROPIC.validate(model, "ModelInfo") == []
    for body in (count, {**MESSAGE, "model": "nobody"}):
        told = http.post("/v1/messages", json=body)
        assert told.status_code in (400, 404)
        assert ANTHROPIC.validate(told.json(), "ErrorResponse") == []


@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize("text", ["It rains.", "Let me look. " + CALL])
def test_chats_and_completions_have_all_that_openais_schemas_want(
    text: str, reason: Any, served: tuple[httpx.Client, Script]
) -> None:
    http, script = served
    script.clear()
    script.text, script.reason = text if reason == "stop" else text[: len(text) * 2 // 3], reason
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    chat = {"model": "demo", "messages": MESSAGE["messages"], "tools": [WEATHER, SEARCH]}
    told = http.post("/v1/chat/completions", json=chat).json()
    assert OPENAI.validate(told, "CreateChatCompletionResponse") == []
    assert told["choices"][0]["message"]["annotations"] == []
    told = http.post("/v1/chat/completions", json={**chat, "tools": [], "logprobs": True}).json()
    assert OPENAI.validate(told, "CreateChatCompletionResponse") == []
    chunks = events_of(http.post("/v1/chat/completions", json={**chat, **streamed}).text)
    found = [said for each in chunks for said in OPENAI.validate(each, "CreateChatCompletionStreamResponse")]
    assert [said for said in found if "None is not" not in said] == []  # its nulls have a notation that is not read
    completion = {"model": "demo", "prompt": "Rain?", "logprobs": 1}
    told = http.post("/v1/completions", json=completion).json()
    assert OPENAI.validate(told, "CreateCompletionResponse") == []
    assert OPENAI.validate(http.get("/v1/models").json(), "ListModelsResponse") == []
    assert OPENAI.validate(http.post("/v1/chat/completions", json={}).json(), "ErrorResponse") == []


def test_files_and_batches_have_all_that_openais_schemas_want(served: tuple[httpx.Client, Script]) -> None:
    http, script = served
    script.clear()
    script.text = "It rains."
    chat = {"model": "demo", "messages": MESSAGE["messages"]}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": chat}
    sent: Any = {"files": {"file": ("lines.jsonl", json.dumps(line).encode())}, "data": {"purpose": "batch"}}
    file = http.post("/v1/files", **sent).json()
    asked = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = http.post("/v1/batches", json=asked).json()
    answers = {
        "OpenAIFile": file,
        "Batch": batch,
        "ListFilesResponse": http.get("/v1/files").json(),
        "ListBatchesResponse": http.get("/v1/batches").json(),
    }
    found = [said for name, answer in answers.items() for said in OPENAI.validate(answer, name)]
    assert [said for said in found if "None is not" not in said] == []  # OpenAI's own answers have these nulls, too
