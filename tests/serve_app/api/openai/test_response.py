"""OpenAI's own SDK reads our answers and errors, whole and streamed."""

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
from serve_app.api import format as sse
from serve_app.api.format import AnswerFormat, AnswerHead, Choice, RankedToken, ShownToken, ToldToken, Usage
from serve_app.api.openai.response import CHAT, COMPLETION, DONE, OpenAiFormat, model_body, models_body, openai_error
from serve_app.api.openai.responses.request import parse_response_request
from serve_app.api.openai.responses.response import ResponsesFormat

USAGE = Usage(prompt_tokens=30, completion_tokens=5, cached_tokens=16)
HEAD = AnswerHead("1", 1700000000, "demo")
RESPONSE_HEAD = replace(HEAD, repeated=parse_response_request(b'{"model": "demo", "input": "x"}').repeated)
CHOICES = [Choice("Hello", "stop"), Choice("World", "length")]
FORMATS: list[AnswerFormat] = [CHAT, COMPLETION, ResponsesFormat()]
every_format = pytest.mark.parametrize("answers", FORMATS, ids=lambda answers: type(answers).__name__)


def _client(status: int, content: bytes, content_type: str = "application/json") -> openai.OpenAI:
    """An SDK client with a server that always gives the same answer."""

    def answer(request: httpx.Request) -> httpx.Response:
        headers = {"content-type": content_type, **(sse.HEADERS if content_type == sse.CONTENT_TYPE else {})}
        return httpx.Response(status, headers=headers, content=content)

    transport = httpx.MockTransport(answer)
    return openai.OpenAI(
        base_url="http://test/v1", api_key="k", max_retries=0, http_client=httpx.Client(transport=transport)
    )


def test_whole_answers_are_the_sdks() -> None:
    """They pass strict validation by the SDK's types, and always report cached tokens; one field more is vLLM's."""
    chat = ChatCompletion.model_validate(json.loads(json.dumps(CHAT.whole(HEAD, CHOICES, USAGE))), strict=True)
    completion = Completion.model_validate(COMPLETION.whole(HEAD, CHOICES, USAGE), strict=True)
    told = [(one.message.content, one.finish_reason) for one in chat.choices]
    assert told == [("Hello", "stop"), ("World", "length")]
    assert [(one.index, one.text) for one in completion.choices] == [(0, "Hello"), (1, "World")]
    for answer in (chat, completion):
        assert answer.usage is not None
        assert answer.usage.model_dump(exclude_none=True) == {
            "prompt_tokens": 30, "completion_tokens": 5, "total_tokens": 35,
            "prompt_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }  # fmt: skip
        for part in (answer, *answer.choices, answer.usage):
            assert not any(part.model_extra.values())
            assert part.model_extra.keys() <= {"prompt_logprobs"}


@pytest.mark.parametrize("include_usage", [True, False])
@pytest.mark.parametrize("answers", [CHAT, COMPLETION], ids=["chat", "completion"])
def test_the_sdk_reads_streamed_answers(answers: OpenAiFormat, include_usage: bool) -> None:
    """A chat's role comes first, then text, reason, and usage alone; usage is null elsewhere only if requested."""
    stream = answers.stream(AnswerHead('"1"', 1700000000, "de\\mo", include_usage))
    content = stream.opening(0, Usage(30, 0, 16)) + stream.text(0, "Hel") + stream.text(0, 'lo\n\n\u2028"é')
    content += stream.finish(0, "stop") + stream.usage(USAGE)
    *events, done, rest = content.split(b"\n\n")
    assert (done + b"\n\n", rest) == (DONE, b"")
    bodies = [json.loads(event.removeprefix(b"data: ")) for event in events]
    client = _client(200, content, sse.CONTENT_TYPE)
    chunks: list[Any]
    if answers is CHAT:
        chunks = list(client.chat.completions.create(model="demo", messages=[], stream=True))
        for body in bodies:
            ChatCompletionChunk.model_validate(body, strict=True)
        assert chunks[0].choices[0].delta.role == "assistant"
        texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    else:
        chunks = list(client.completions.create(model="demo", prompt="x", stream=True))
        texts = ["", *(chunk.choices[0].text for chunk in chunks if chunk.choices)]
    for body in bodies:
        assert ("usage" in body) == include_usage
    heads = {(chunk.id.split("-", 1)[1], chunk.model, chunk.created) for chunk in chunks}
    assert heads == {('"1"', "de\\mo", 1700000000)}
    assert texts[:-1] == ["", "Hel", 'lo\n\n\u2028"é']
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-2:] == [None, "stop"]
    if include_usage:
        assert (chunks[-1].choices, chunks[-1].usage.total_tokens) == ([], 35)
        assert all(chunk.usage is None for chunk in chunks[:-1])


TOLD = (
    ToldToken(ShownToken(b"Hi", -0.5), (ShownToken(b"Hi", -0.5), ShownToken(b"Ho", -1.5)), 0),
    ToldToken(ShownToken(b"\xe6\x9c", float("-inf")), (ShownToken(b" x", -0.1),), 2),
)


def _told(answers: AnswerFormat, kind: Any) -> list[Any]:
    """The logprobs of a whole answer, then of each chunk of its stream."""
    body = answers.whole(HEAD, [Choice("Hi", "stop", logprobs=TOLD), Choice("Hi", "stop", logprobs=())], USAGE)
    whole = kind.model_validate(json.loads(json.dumps(body, allow_nan=False)), strict=True)
    stream = answers.stream(HEAD)
    content = stream.opening(0, USAGE) + stream.text(0, "Hi", TOLD) + stream.finish(0, "stop") + stream.usage(USAGE)
    client: Any = _client(200, content, sse.CONTENT_TYPE)
    asked = {"model": "m", "stream": True}
    if kind is ChatCompletion:
        chunks = client.chat.completions.create(messages=[], **asked)
    else:
        chunks = client.completions.create(prompt="x", **asked)
    return [choice.logprobs for answer in (whole, *chunks) for choice in answer.choices]


def test_logprobs_of_a_chat_are_the_sdks() -> None:
    """Whole and streamed: half a character has bytes, and an impossible token a number."""
    whole, empty, opening, streamed, end = _told(CHAT, ChatCompletion)
    for told in (whole, streamed):
        first, second = told.content
        assert (first.token, first.bytes, first.logprob) == ("Hi", [72, 105], -0.5)
        assert [(other.token, other.logprob) for other in first.top_logprobs] == [("Hi", -0.5), ("Ho", -1.5)]
        assert (second.token, second.bytes, second.logprob) == ("\ufffd", [0xE6, 0x9C], -9999.0)
    assert (empty.content, opening, end) == ([], None, None)


def test_logprobs_of_a_completion_are_the_sdks() -> None:
    """The older format has parallel lists, and a token is among its own likeliest."""
    whole, _, streamed, _ = _told(COMPLETION, Completion)
    for told in (whole, streamed):
        assert told.tokens == ["Hi", "bytes:\\xe6\\x9c"]
        assert told.token_logprobs == [-0.5, -9999.0]
        assert told.text_offset == [0, 2]
        assert told.top_logprobs == [{"Hi": -0.5, "Ho": -1.5}, {"bytes:\\xe6\\x9c": -9999.0, " x": -0.1}]


def test_a_prompts_logprobs_have_vllms_shape() -> None:
    """A list that begins with null, then tokens by id; in each choice of a completion, once in a chat."""
    own, other = RankedToken(7, b"\xe6\x9c", float("-inf"), 9), RankedToken(5, b" x", -0.25, 1)
    choices = [Choice("Hi", "stop", prompt=((own, other), (other,))), Choice("Ho", "stop", prompt=())]
    shown = {"logprob": -0.25, "rank": 1, "decoded_token": " x"}
    first = [None, {"7": {"logprob": -9999.0, "rank": 9, "decoded_token": "\ufffd"}, "5": shown}, {"5": shown}]
    completion = COMPLETION.whole(HEAD, choices, USAGE)
    assert [choice["prompt_logprobs"] for choice in completion["choices"]] == [first, [None]]
    assert "prompt_logprobs" not in completion
    chat = CHAT.whole(HEAD, choices, USAGE)
    assert chat["prompt_logprobs"] == first
    assert not any("prompt_logprobs" in choice for choice in chat["choices"])
    assert CHAT.whole(HEAD, CHOICES, USAGE)["prompt_logprobs"] is None


def test_the_first_token_of_an_echo_has_no_logprob() -> None:
    """OpenAI's legacy shape: null in both lists."""
    begin = ToldToken(ShownToken(b"So", None), (), 0)
    told = COMPLETION.whole(HEAD, [Choice("SoHi", "stop", logprobs=(begin, *TOLD))], USAGE)["choices"][0]["logprobs"]
    assert told["tokens"][0] == "So"
    assert (told["token_logprobs"][:2], told["top_logprobs"][:2]) == ([None, -0.5], [None, {"Hi": -0.5, "Ho": -1.5}])


def test_logprobs_of_a_response_are_the_sdks() -> None:
    """They are in the whole part, in the deltas as they arrive, and again in the final text event."""
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


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=20), index=st.integers(0, 15))
def test_any_text_survives_a_chunk(text: str, index: int) -> None:
    """Quotes, line breaks and control characters stay inside one data line."""
    for stream in (CHAT.stream(HEAD), COMPLETION.stream(AnswerHead("i", 1, "m", True))):
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
        (errors.ModelNotFound("No such model."), openai.NotFoundError),
        (errors.RateLimited("Full.", retry_after_s=1), openai.RateLimitError),
        (errors.GenerationFailed("Failed."), openai.InternalServerError),
    ],
)
def test_errors_are_the_sdks(error: errors.WarmpathError, raised: type[openai.APIStatusError]) -> None:
    shown = openai_error(error, "id")
    client = _client(shown.status, json.dumps(shown.body).encode())
    with pytest.raises(raised) as caught:
        client.chat.completions.create(model="demo", messages=[])
    assert (caught.value.param, caught.value.code, caught.value.type) == (error.param, error.code, error.type)
    assert error.message in caught.value.message


def test_an_error_in_mid_stream_is_raised_by_the_sdk() -> None:
    stream = CHAT.stream(HEAD)
    content = stream.text(0, "Hel") + stream.error(errors.GenerationFailed("The replica died."))
    client = _client(200, content, sse.CONTENT_TYPE)
    chunks = iter(client.chat.completions.create(model="demo", messages=[], stream=True))
    assert next(chunks).choices[0].delta.content == "Hel"
    with pytest.raises(openai.APIError, match="The replica died"):
        next(chunks)


def test_models_are_the_sdks() -> None:
    body = model_body("demo", 1700000000, 32768)
    assert Model.model_validate(body, strict=True).owned_by == "warmpath"
    assert [model.id for model in _client(200, json.dumps(models_body([body])).encode()).models.list()] == ["demo"]


@every_format
def test_two_streams_of_one_format_share_nothing(answers: AnswerFormat) -> None:
    """A format is one object for all requests of a process."""
    first, second = answers.stream(HEAD), answers.stream(RESPONSE_HEAD)
    first.opening(0, USAGE)
    first.text(0, "y")
    first.finish(0, "stop")
    assert second.text(0, "x") == answers.stream(RESPONSE_HEAD).text(0, "x")


@every_format
def test_an_error_has_its_sentence_before_and_within_a_stream(answers: AnswerFormat) -> None:
    """A stream's error is its last event, and one event."""
    error = errors.InvalidRequest('Send "n" as a number.', param="n")
    sentence = json.dumps(error.message).encode()
    assert sentence in json.dumps(answers.error(error, "request-1").body).encode()
    event = answers.stream(HEAD).error(error)
    assert (event.count(b"\n\n"), sentence in event) == (1, True)
