"""The real OpenAI client over a real socket against a real two-replica instance."""

from __future__ import annotations

import concurrent.futures
import random

import httpx
import openai
import pytest
from openai import OpenAI

from tests.integration.conftest import PATIENCE_S, eventually, wait_until_cached

pytestmark = pytest.mark.integration

SYSTEM = "You are a careful clerk. " + "Name the clause, the date and the amount before any advice. " * 40


def asked(question: str, system: str) -> dict[str, object]:
    """The body of what ``ask`` asks."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return {"model": "demo", "messages": messages, "max_tokens": 8}


def ask(client: OpenAI, question: str, system: str = SYSTEM, **extra: object) -> openai.types.chat.ChatCompletion:
    return client.chat.completions.create(
        model="demo",
        messages=[{"role": "system", "content": system}, {"role": "user", "content": question}],
        max_tokens=8,
        temperature=0,
        **extra,  # type: ignore[arg-type]
    )


def cached(completion: openai.types.chat.ChatCompletion) -> int:
    assert completion.usage is not None
    assert completion.usage.prompt_tokens_details is not None
    assert completion.usage.prompt_tokens_details.cached_tokens is not None
    return completion.usage.prompt_tokens_details.cached_tokens


def test_models(client: OpenAI) -> None:
    """The served model is listed and can be fetched by name."""
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"


def test_second_request_reuses_the_system_prompt(client: OpenAI, url: str) -> None:
    """A prefix seen once is served from cache, with the same answer as without it."""
    system = "Rule one. " + SYSTEM
    first = ask(client, "When is it due?", system)
    wait_until_cached(url, asked("When is it due?", system), first.usage.prompt_tokens - 16 - 1)  # type: ignore[union-attr]
    second = ask(client, "When is it due?", system)
    fresh = ask(client, "When is it due?", system, extra_body={"cache_salt": "elsewhere"})
    assert cached(first) == 0
    assert cached(second) >= first.usage.prompt_tokens - 16 - 1  # type: ignore[union-attr]
    assert cached(fresh) == 0
    assert first.choices[0].message.content == second.choices[0].message.content == fresh.choices[0].message.content


def test_a_miss_is_explained(client: OpenAI, url: str) -> None:
    """A date at the top costs the whole prompt: told in usage and counted; a hit says nothing."""
    asks = {"cache_diagnostics": True}
    ask(client, "When is it due?", "Today is 2026-11-21. " + SYSTEM)
    second = ask(client, "When is it due?", "Today is 2026-11-22. " + SYSTEM, extra_body=asks)
    miss = second.model_dump()["usage"]["prompt_tokens_details"]["cache_miss"]
    assert (miss["reason"], miss["first_difference"]["part"]) == ("time", "system")
    assert miss["lost_tokens"] > second.usage.prompt_tokens / 2  # type: ignore[union-attr]
    eventually(lambda: 'reason="time",tenant="default"} 1.0' in httpx.get(f"{url}/metrics").text)
    wait_until_cached(url, asked("When is it due?", "Today is 2026-11-22. " + SYSTEM), miss["lost_tokens"])
    again = ask(client, "When is it due?", "Today is 2026-11-22. " + SYSTEM, extra_body=asks)
    assert "cache_miss" not in again.model_dump()["usage"]["prompt_tokens_details"]


def test_stream_equals_whole(client: OpenAI) -> None:
    """A streamed answer is the whole answer in pieces, and ends with usage when asked for."""
    whole = ask(client, "Say it twice.")
    stream = client.chat.completions.create(
        model="demo",
        messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Say it twice."}],
        max_tokens=8,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8
    assert all(c.usage is None for c in chunks[:-1])


def test_text_parts_are_joined(client: OpenAI) -> None:
    """Content as a list of text parts means their concatenation."""
    plain = ask(client, "one two")
    parts = client.chat.completions.create(
        model="demo",
        messages=[
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]},
        ],
        max_tokens=8,
        temperature=0,
    )
    assert parts.choices[0].message.content == plain.choices[0].message.content


def test_completions_and_several_choices(client: OpenAI) -> None:
    """Prompts as text and as ids, several at once, several choices each; choices are numbered in order."""
    answer = client.completions.create(model="demo", prompt=["Alpha beta", "Gamma"], n=2, max_tokens=5, temperature=0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text == answer.choices[1].text
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 20
    by_ids = client.completions.create(model="demo", prompt=[[5, 6, 7, 8]], max_tokens=3, temperature=0)
    assert by_ids.usage is not None
    assert by_ids.usage.prompt_tokens == 4
    streamed = client.completions.create(
        model="demo", prompt=["Alpha beta", "Gamma"], max_tokens=5, temperature=0, stream=True
    )
    texts = {0: "", 1: ""}
    for chunk in streamed:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {0: answer.choices[0].text, 1: answer.choices[2].text}


def test_sampling_depends_on_the_seed_only(client: OpenAI) -> None:
    """The same seed gives the same answer, cached or not; another seed (almost surely) another."""

    def sample(seed: int) -> str | None:
        answer = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "Tell me a story."}],
            max_tokens=24,
            temperature=1.0,
            top_p=0.95,
            seed=seed,
            extra_body={"top_k": 200},
        )
        return answer.choices[0].message.content

    assert sample(7) == sample(7)
    assert sample(7) != sample(8)


def test_stop_ends_the_answer_before_the_stop_string(client: OpenAI) -> None:
    """A stop string ends the answer, is not part of it, and gives finish_reason stop."""
    whole = client.completions.create(model="demo", prompt="Once upon", max_tokens=24, temperature=0)
    text = whole.choices[0].text
    stop = text[8:11]
    stopped = client.completions.create(model="demo", prompt="Once upon", max_tokens=24, temperature=0, stop=stop)
    assert stopped.choices[0].text == text[: text.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("extra", "error", "word"),
    [
        ({"model": "gpt-9"}, openai.NotFoundError, "gpt-9"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"top_p": 0}, openai.BadRequestError, "top_p"),
        ({"max_tokens": 40000}, openai.BadRequestError, "32768"),
        ({"extra_body": {"prompt_logprobs": 1}}, openai.BadRequestError, "prompt_logprobs"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
            openai.BadRequestError,
            "text",
        ),
    ],
)
def test_errors_have_openais_shape(client: OpenAI, extra: dict, error: type[openai.APIStatusError], word: str) -> None:
    """Bad requests raise the client's own exception classes, with a sentence that names what to change."""
    body = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4, **extra}
    with pytest.raises(error) as caught:
        client.chat.completions.create(**body)
    assert word in str(caught.value)
    assert isinstance(caught.value.body, dict)
    assert {"message", "type", "param", "code"} <= set(caught.value.body)
    assert caught.value.response.headers["x-request-id"]


def test_unknown_fields_are_ignored(client: OpenAI) -> None:
    """As with OpenAI's server, a field nobody knows changes nothing."""
    assert ask(client, "x", extra_body={"no_such_field": {"deep": [1]}}).choices[0].message.content == (
        ask(client, "x").choices[0].message.content
    )


def test_concurrent_prompts_find_their_replica(client: OpenAI, url: str) -> None:
    """Many clients, ten system prompts in random order: nearly every request after a prompt's first is a hit."""
    prompts = [f"Assistant number {i}. " + "Follow the house rules closely. " * 90 for i in range(10)]
    for prompt in prompts:
        ask(client, "warm", prompt)
        wait_until_cached(url, asked("warm", prompt))
    order = prompts * 6
    random.Random(3).shuffle(order)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda item: ask(client, f"question {item[0]}", item[1]), enumerate(order)))
    hits = sum(cached(answer) > 100 for answer in answers)
    assert hits >= 0.95 * len(answers)
    shown = ("best", "selected", "delivered", "warmpath_time_to_first_token_seconds_bucket{")

    def all_are_shown() -> bool:
        metrics = httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text
        return all(name in metrics for name in (*shown, "warmpath_prefix_cache_hits_total"))

    eventually(all_are_shown)


def test_the_api_is_described_where_no_keys_are_needed(url: str) -> None:
    """What FastAPI publishes names the bodies' real fields; the page is FastAPI's own."""
    schema = httpx.get(f"{url}/openapi.json", timeout=PATIENCE_S).json()
    assert "/v1/chat/completions" in schema["paths"]
    assert {"messages", "temperature", "cache_salt"} <= set(schema["components"]["schemas"]["ChatBody"]["properties"])
    assert "openapi.json" in httpx.get(f"{url}/docs", timeout=PATIENCE_S).text
