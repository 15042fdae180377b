"""Every API's format does what the ingress counts on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serve_app.api.format import AnswerFormat, AnswerHead, Choice, Usage
from serve_app.api.openai.response import ChatFormat, CompletionFormat
from serve_app.api.openai.responses.response import ResponsesFormat
from serve_app.errors import InvalidRequest, Overloaded, WarmpathError

FORMATS: list[AnswerFormat] = [ChatFormat(), CompletionFormat(), ResponsesFormat()]
HEAD = AnswerHead("id-of-ours", 1700000000, "a model", include_usage=True)
NO_USAGE = AnswerHead("id-of-ours", 1700000000, "a model")
SOME = Usage(prompt_tokens=1234, completion_tokens=567, cached_tokens=1216)
TEXT = 'Line one\nline "two"\r\n\u2028 é 😀'

every_format = pytest.mark.parametrize("answers", FORMATS, ids=lambda answers: type(answers).__name__)


def events(raw: bytes) -> list[bytes]:
    """The data of each event; checks the framing."""
    assert raw == b"" or raw.endswith(b"\n\n")
    blocks = raw.split(b"\n\n")[:-1]
    lines = [line for block in blocks for line in block.split(b"\n")]
    assert all(line.startswith((b"data: ", b"event: ")) for line in lines)
    return [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")]


def values(document: Any) -> list[Any]:
    """Every value that a document holds, however deep."""
    if isinstance(document, dict):
        return [found for value in document.values() for found in values(value)]
    if isinstance(document, list):
        return [found for value in document for found in values(value)]
    return [document]


@every_format
def test_a_whole_answer_names_its_id_model_texts_and_tokens(answers: AnswerFormat) -> None:
    """JSON can say all of it, and choices are in order."""
    choices = [Choice(TEXT, "stop"), Choice("", "length")]
    found = values(json.loads(json.dumps(answers.whole(HEAD, choices, SOME))))
    assert {"a model", TEXT, 1234, 567, 1216} <= set(found)
    assert any(str(value).endswith("id-of-ours") for value in found)


@every_format
def test_an_answer_without_text_is_an_answer(answers: AnswerFormat) -> None:
    """A stop string may come first of all."""
    assert answers.whole(HEAD, [Choice("", "stop")], Usage(1, 1, 0))


@every_format
@pytest.mark.parametrize("head", [HEAD, NO_USAGE], ids=["usage", "no usage"])
def test_every_call_of_a_stream_returns_framed_events(answers: AnswerFormat, head: AnswerHead) -> None:
    """Two choices in turn, where there can be; text arrives as it was, and all but OpenAI's last is JSON with an id."""
    stream = answers.stream(head)
    calls = [stream.opening(0, Usage(1234, 0, 1216)), stream.text(0, TEXT)]
    if not isinstance(answers, ResponsesFormat):
        calls += [stream.opening(1, Usage(1234, 3, 1216)), stream.text(1, "b"), stream.finish(1, "length")]
    calls += [stream.finish(0, "stop"), stream.usage(SOME)]
    sent = [data for call in calls for data in events(call) if data != b"[DONE]"]
    documents = [json.loads(data) for data in sent]
    assert TEXT in values(documents)
    assert any(str(value).endswith("id-of-ours") for value in values(documents))
    assert (567 in values(documents)) == (head.include_usage or isinstance(answers, ResponsesFormat))
    assert events(calls[1])
    assert events(calls[-1])


@every_format
def test_two_streams_of_one_format_share_nothing(answers: AnswerFormat) -> None:
    """A format is one object for all requests of a process."""
    first, second = answers.stream(HEAD), answers.stream(AnswerHead("another", 1, "m"))
    first.opening(0, SOME)
    first.text(0, "y")
    first.finish(0, "stop")
    assert second.text(0, "x") == answers.stream(AnswerHead("another", 1, "m")).text(0, "x")


@every_format
@pytest.mark.parametrize("error", [InvalidRequest("Send n as a number.", param="n"), Overloaded("No replica now.")])
def test_an_error_says_its_sentence_before_and_within_a_stream(answers: AnswerFormat, error: WarmpathError) -> None:
    """The status is an error's; a stream's error is its last event, and one event."""
    shown = answers.error(error, "request-1")
    assert 400 <= shown.status < 600
    assert error.message in values(json.loads(json.dumps(shown.body)))
    (event,) = events(answers.stream(HEAD).error(error))
    assert error.message in values(json.loads(event))
