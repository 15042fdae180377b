"""The client of any OpenAI endpoint: unreported values are unknown, and an interrupted stream has failed."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from serve_app.replay.client import StreamCut, TimedAnswer, stream_answer
from serve_app.replay.open_loop import UNKNOWN, hit_rate

TEXT = [{"choices": [{"text": "a"}]}, {"choices": [{"text": "b", "finish_reason": "length"}]}]
USAGE = {"prompt_tokens": 10, "completion_tokens": 5}


def answer_of(*events: dict[str, Any] | str) -> TimedAnswer:
    lines = [event if isinstance(event, str) else json.dumps(event) for event in events]
    stream = "".join(f"data: {line}\n\n" for line in lines)

    async def ask() -> TimedAnswer:
        transport = httpx.MockTransport(lambda request: httpx.Response(200, text=stream))
        async with httpx.AsyncClient(transport=transport) as client:
            return await stream_answer(client, "http://any/v1/completions", {})

    return asyncio.run(ask())


@pytest.mark.parametrize("details", [{}, {"prompt_tokens_details": None}, {"prompt_tokens_details": {}}])
def test_usage_may_be_told_in_part_or_not_at_all(details: dict[str, Any]) -> None:
    """Answers without cached tokens are left out of the hit rate of the others."""
    silent = answer_of(*TEXT, {"choices": [], "usage": {**USAGE, **details}}, "[DONE]")
    assert not silent.reports_cached and silent.completion_tokens == 5
    assert hit_rate([silent]) == UNKNOWN
    cached = {"prompt_tokens_details": {"cached_tokens": 4}}
    told = answer_of(*TEXT, {"choices": [], "usage": {**USAGE, **cached}}, "[DONE]")
    assert (told.text, told.prompt_tokens, told.cached_tokens, told.completion_tokens) == ("ab", 10, 4, 5)
    assert hit_rate([silent, told]) == 0.4
    assert answer_of(*TEXT, "[DONE]").completion_tokens == 2


@pytest.mark.parametrize(
    ("end", "why"), [([], "ended early"), ([{"error": {"code": "replicas_lost"}}, "[DONE]"], "replicas_lost")]
)
def test_a_stream_that_breaks_off_has_failed(end: list[dict[str, Any] | str], why: str) -> None:
    with pytest.raises(StreamCut, match=why):
        answer_of(*TEXT, *end)


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
def test_text_may_hold_other_line_separators(separator: str) -> None:
    """Only a newline ends a line of an event stream; a model's text may contain the other separators."""
    event = json.dumps({"choices": [{"text": f"a{separator}b"}]}, ensure_ascii=False)
    assert separator in event
    assert answer_of(event, "[DONE]").text == f"a{separator}b"
