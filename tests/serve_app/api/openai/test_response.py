"""What is sent is what OpenAI's own SDK reads, whole and streamed, answers and errors."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response

from serve_app import errors
from serve_app.api import sse
from serve_app.api.format import AnswerHead, AnswerStream, Choice, ShownToken, ToldToken, Usage
from serve_app.api.openai.response import (
    DONE,
    ChatFormat,
    CompletionFormat,
    model_body,
    models_body,
    openai_error,
)
from serve_app.api.openai.responses.request import parse_response_request
from serve_app.api.openai.responses.response import ResponsesFormat

USAGE = Usage(prompt_tokens=30, completion_tokens=5, cached_tokens=16)
HEAD = AnswerHead("1", 1700000000, "demo")
RESPONSE_HEAD = replace(HEAD, repeated=parse_response_request(b'{"model": "demo", "input": "x"}').repeated)
CHOICES = [Choice("Hello", "stop"), Choice("World", "length")]


def _client(status: int, content: bytes, content_type: str = "application/json") -> openai.OpenAI:
    """An SDK client whose server always answers the same."""

    def answer(request: httpx.Request) -> httpx.Response:
        headers = {"content-type": content_type, **(sse.HEADERS if content_type == sse.CONTENT_TYPE else {})}
        return httpx.Response(status, headers=headers, content=content)

    transport = httpx.MockTransport(answer)
    return openai.OpenAI(
        base_url="http://test/v1", api_key="k", max_retries=0, http_client=httpx.Client(transport=transport)
    )


def test_usage_always_tells_cached_tokens() -> None:
    """Also when there are none."""
    assert ChatFormat().whole(HEAD, CHOICES, Usage(3, 0, 0))["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 0,
        "total_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_a_whole_chat_completion_is_the_sdks() -> None:
    """Strict validation against the SDK's type, and every field where it belongs."""
    body = json.loads(json.dumps(ChatFormat().whole(HEAD, CHOICES, USAGE)))
    parsed = ChatCompletion.model_validate(body, strict=True)
    assert [(choice.message.content, choice.finish_reason) for choice in parsed.choices] == [
        ("Hello", "stop"),
        ("World", "length"),
    ]
    assert parsed.usage is not None
    assert parsed.usage.prompt_tokens_details is not None
    assert (parsed.usage.total_tokens, parsed.usage.prompt_tokens_details.cached_tokens) == (35, 16)
    assert not (set(body) | set(body["choices"][0]) | set(body["usage"])) - (
        set(ChatCompletion.model_fields)
        | {"index", "message", "logprobs", "finish_reason"}
        | {"prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"}
    )


def test_a_whole_completion_is_the_sdks() -> None:
    """The same for completions."""
    parsed = Completion.model_validate(CompletionFormat().whole(HEAD, CHOICES, USAGE), strict=True)
    assert [(choice.index, choice.text, choice.finish_reason) for choice in parsed.choices] == [
        (0, "Hello", "stop"),
        (1, "World", "length"),
    ]
    assert parsed.object == "text_completion"


def _stream(stream: AnswerStream) -> tuple[bytes, list[dict[str, Any]]]:
    """A whole stream as it is sent, and the JSON of its chunks."""
    content = stream.opening(0, Usage(30, 0, 16)) + stream.text(0, "Hel") + stream.text(0, 'lo\n\n\u2028"é')
    content += stream.finish(0, "stop") + stream.usage(USAGE)
    *events, done, rest = content.split(b"\n\n")
    assert (done + b"\n\n", rest) == (DONE, b"")
    return content, [json.loads(event.removeprefix(b"data: ")) for event in events]


@pytest.mark.parametrize("include_usage", [True, False])
def test_a_streamed_chat_is_what_the_sdk_reads(include_usage: bool) -> None:
    """Role first, text, reason, then usage alone; other chunks carry usage null only if it was asked for."""
    content, bodies = _stream(ChatFormat().stream(AnswerHead('"1"', 1700000000, "de\\mo", include_usage)))
    for body in bodies:
        ChatCompletionChunk.model_validate(body, strict=True)
        assert ("usage" in body) == include_usage
    client = _client(200, content, sse.CONTENT_TYPE)
    chunks = list(client.chat.completions.create(model="demo", messages=[], stream=True))
    assert len(chunks) == len(bodies)
    assert {(chunk.id, chunk.model, chunk.created) for chunk in chunks} == {('chatcmpl-"1"', "de\\mo", 1700000000)}
    deltas = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert deltas[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for choice in deltas) == 'Hello\n\n\u2028"é'
    assert [choice.finish_reason for choice in deltas] == [None, None, None, "stop"]
    if include_usage:
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.prompt_tokens == 30
        assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.parametrize("include_usage", [True, False])
def test_a_streamed_completion_is_what_the_sdk_reads(include_usage: bool) -> None:
    """The same for completions, which have no opening chunk."""
    stream = CompletionFormat().stream(AnswerHead("1", 1700000000, "demo", include_usage))
    assert stream.opening(0, USAGE) == b""
    content, bodies = _stream(stream)
    assert all(("usage" in body) == include_usage for body in bodies)
    client = _client(200, content, sse.CONTENT_TYPE)
    chunks = list(client.completions.create(model="demo", prompt="x", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == 'Hello\n\n\u2028"é'
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices] == [None, None, "stop"]
    if include_usage:
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.total_tokens == 35


TOLD = (
    ToldToken(ShownToken(b"Hi", -0.5), (ShownToken(b"Hi", -0.5), ShownToken(b"Ho", -1.5)), 0),
    ToldToken(ShownToken(b"\xe6\x9c", float("-inf")), (ShownToken(b" x", -0.1),), 2),
)


def test_logprobs_of_a_chat_are_the_sdks() -> None:
    """Whole and streamed; half a character has bytes, and what is impossible a number."""
    body = ChatFormat().whole(HEAD, [Choice("Hi", "stop", logprobs=TOLD), Choice("Hi", "stop", logprobs=())], USAGE)
    whole = ChatCompletion.model_validate(json.loads(json.dumps(body, allow_nan=False)), strict=True)
    stream = ChatFormat().stream(HEAD)
    content = stream.opening(0, USAGE) + stream.text(0, "Hi", TOLD) + stream.finish(0, "stop") + stream.usage(USAGE)
    chunks = list(_client(200, content, sse.CONTENT_TYPE).chat.completions.create(model="m", messages=[], stream=True))
    for told in (whole.choices[0].logprobs, chunks[1].choices[0].logprobs):
        assert told is not None
        assert told.content is not None
        first, second = told.content
        assert (first.token, first.bytes, first.logprob) == ("Hi", [72, 105], -0.5)
        assert [(other.token, other.logprob) for other in first.top_logprobs] == [("Hi", -0.5), ("Ho", -1.5)]
        assert (second.token, second.bytes, second.logprob) == ("\ufffd", [0xE6, 0x9C], -9999.0)
    assert whole.choices[1].logprobs is not None
    assert whole.choices[1].logprobs.content == []
    assert [chunks[i].choices[0].logprobs for i in (0, 2)] == [None, None]


def test_logprobs_of_a_response_are_the_sdks() -> None:
    """In the part whole, in the deltas as they come, and again where the text is done."""
    body = ResponsesFormat().whole(RESPONSE_HEAD, [Choice("Hi", "stop", logprobs=TOLD)], USAGE)
    whole = Response.model_validate_json(json.dumps(body, allow_nan=False), strict=True)
    stream = ResponsesFormat().stream(RESPONSE_HEAD)
    content = stream.opening(0, USAGE) + stream.text(0, "H", TOLD[:1]) + stream.text(0, "i", TOLD[1:])
    content += stream.finish(0, "stop") + stream.usage(USAGE)
    events = list(_client(200, content, sse.CONTENT_TYPE).responses.create(model="m", input="x", stream=True))
    deltas = [event.logprobs for event in events if event.type == "response.output_text.delta"]
    assert [[told.token for told in one] for one in deltas] == [["Hi"], ["\ufffd"]]
    assert [(other.token, other.logprob) for other in deltas[0][0].top_logprobs or ()] == [("Hi", -0.5), ("Ho", -1.5)]
    (done,) = (event for event in events if event.type == "response.output_text.done")
    assert [(told.token, told.logprob) for told in done.logprobs] == [("Hi", -0.5), ("\ufffd", -9999.0)]
    last = events[-1]
    assert last.type == "response.completed"
    for response in (whole, last.response):
        (part,) = response.output[0].content  # type: ignore[union-attr]
        assert [told.bytes for told in part.logprobs] == [[72, 105], [0xE6, 0x9C]]  # type: ignore[union-attr]


def test_logprobs_of_a_completion_are_the_sdks() -> None:
    """The older shape: lists side by side, and a token is among its own likeliest."""
    body = CompletionFormat().whole(HEAD, [Choice("Hi", "stop", logprobs=TOLD)], USAGE)
    whole = Completion.model_validate(json.loads(json.dumps(body, allow_nan=False)), strict=True)
    stream = CompletionFormat().stream(HEAD)
    content = stream.text(0, "Hi", TOLD) + stream.finish(0, "stop") + stream.usage(USAGE)
    chunks = list(_client(200, content, sse.CONTENT_TYPE).completions.create(model="m", prompt="x", stream=True))
    for told in (whole.choices[0].logprobs, chunks[0].choices[0].logprobs):
        assert told is not None
        assert told.tokens == ["Hi", "bytes:\\xe6\\x9c"]
        assert told.token_logprobs == [-0.5, -9999.0]
        assert told.text_offset == [0, 2]
        assert told.top_logprobs == [{"Hi": -0.5, "Ho": -1.5}, {"bytes:\\xe6\\x9c": -9999.0, " x": -0.1}]


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=20), index=st.integers(0, 15))
def test_any_text_survives_a_chunk(text: str, index: int) -> None:
    """Quotes, line breaks and control characters stay inside one data line."""
    for stream in (ChatFormat().stream(HEAD), CompletionFormat().stream(AnswerHead("i", 1, "m", True))):
        event = stream.text(index, text)
        assert event.startswith(b"data: {")
        assert event.count(b"\n") == 2
        assert b"\r" not in event
        choice = json.loads(event[6:])["choices"][0]
        assert choice["index"] == index
        assert choice.get("text", choice.get("delta", {}).get("content")) == text


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (errors.InvalidRequest("Bad n.", param="n"), openai.BadRequestError),
        (errors.AuthenticationFailed("No key."), openai.AuthenticationError),
        (errors.PermissionDenied("No."), openai.PermissionDeniedError),
        (errors.ModelNotFound("No such model."), openai.NotFoundError),
        (errors.RateLimited("Full.", retry_after_s=1), openai.RateLimitError),
        (errors.GenerationFailed("Failed."), openai.InternalServerError),
    ],
)
def test_errors_are_the_sdks(error: errors.WarmpathError, raised: type[openai.APIStatusError]) -> None:
    """The SDK finds message, param and code where it looks for them."""
    shown = openai_error(error, "id")
    client = _client(shown.status, json.dumps(shown.body).encode())
    with pytest.raises(raised) as caught:
        client.chat.completions.create(model="demo", messages=[])
    assert (caught.value.param, caught.value.code, caught.value.type) == (error.param, error.code, error.type)
    assert error.message in caught.value.message


def test_an_error_in_mid_stream_is_raised_by_the_sdk() -> None:
    """Text that came before it is read; then the SDK raises with the message."""
    stream = ChatFormat().stream(HEAD)
    content = stream.text(0, "Hel") + stream.error(errors.GenerationFailed("The replica died."))
    client = _client(200, content, sse.CONTENT_TYPE)
    chunks = iter(client.chat.completions.create(model="demo", messages=[], stream=True))
    assert next(chunks).choices[0].delta.content == "Hel"
    with pytest.raises(openai.APIError, match="The replica died"):
        next(chunks)


def test_models_are_the_sdks() -> None:
    """Listed and alone."""
    body = model_body("demo", 1700000000, 32768)
    assert Model.model_validate(body, strict=True).owned_by == "warmpath"
    client = _client(200, json.dumps(models_body([body])).encode())
    assert [model.id for model in client.models.list()] == ["demo"]


def test_streams_may_not_be_held_back() -> None:
    """The headers that tell caches and nginx so."""
    assert sse.HEADERS == {"cache-control": "no-cache", "x-accel-buffering": "no"}
    assert sse.CONTENT_TYPE.startswith("text/event-stream")
