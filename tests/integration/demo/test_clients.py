"""The real OpenAI and Anthropic clients over a real socket, to a real model."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from anthropic import Anthropic

from tests.integration.conftest import PATIENCE_S, eventually
from tests.integration.demo.conftest import CHAT, KEYS, Served, said

pytestmark = pytest.mark.integration

CLERK = "You are a careful clerk. " + "Name the clause, the date and the amount before any advice. " * 40
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Bergen"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def test_a_prompt_seen_once_is_read_from_the_cache(served: Served) -> None:
    """The answer is the same whole, streamed, and under a salt with a cold cache."""
    client = served.openai()
    messages: Any = said(("system", "Rule one. " + CLERK), ("user", "When is it due?"))
    fields: Any = {"model": "demo", "messages": messages, "max_tokens": 8, "temperature": 0}
    first = client.chat.completions.create(**fields)
    tokens = first.usage.prompt_tokens - 17
    served.wait_until_held("acme", tokens, ("system", "Rule one. " + CLERK), ("user", "When is it due?"))
    second = client.chat.completions.create(**fields)
    fresh = client.chat.completions.create(**fields, extra_body={"cache_salt": "elsewhere"})
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in (first, second, fresh)]
    assert (cached[0], cached[1] >= tokens, cached[2]) == (0, True, 0)
    text = first.choices[0].message.content
    assert text == second.choices[0].message.content == fresh.choices[0].message.content
    *chunks, last = client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert (chunks[-1].choices[0].finish_reason, last.choices, last.usage.completion_tokens) == ("length", [], 8)


def test_answers_match_their_schema_and_logprobs_their_tokens(served: Served) -> None:
    """The model's weights are random, so only the grammar can produce JSON; a greedy token is the likeliest."""
    create: Any = served.openai().chat.completions.create
    fields = {"model": "demo", "messages": said(("user", "Where?")), "max_tokens": 400, "seed": 5}
    form = {"type": "json_schema", "json_schema": {"name": "it", "strict": True, "schema": PARAMETERS}}
    whole = create(**fields, response_format=form, n=3).choices
    for choice in whole:
        found = json.loads(choice.message.content)
        assert found["city"] in ("Oslo", "Bergen") and 1 <= found["days"] <= 9
    chunks = create(**fields, response_format=form, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole[0].message.content
    told = create(**{**fields, "max_tokens": 12}, temperature=0, logprobs=True, top_logprobs=3)
    tokens = told.choices[0].logprobs.content
    assert len(tokens) == told.usage.completion_tokens
    assert bytes(byte for token in tokens for byte in token.bytes).decode(errors="replace") == (
        told.choices[0].message.content
    )
    assert all(token.logprob == token.top_logprobs[0].logprob for token in tokens)


def test_a_marked_prompt_is_written_once_and_read_after(served: Served) -> None:
    """A pre-warming request without an answer first creates all of the cache; the next one reads all of it.

    docs: first-hour
    """
    client = Anthropic(base_url=served.url, api_key=KEYS["acme"][0], max_retries=0, timeout=PATIENCE_S)
    marked: Any = [{"type": "text", "text": f"Messages. {CLERK}", "cache_control": {"type": "ephemeral"}}]

    def asked(question: str, max_tokens: int) -> Any:
        messages = [{"role": "user", "content": question}]
        greedy = {"temperature": 0.0}  # the API has it, the client's methods no longer do
        return {
            "model": "demo", "max_tokens": max_tokens, "system": marked, "messages": messages, "extra_body": greedy
        }  # fmt: skip

    warm = client.messages.create(**asked("Hi", 0))
    written = warm.usage.cache_creation_input_tokens
    assert (warm.content, warm.stop_reason, warm.usage.cache_read_input_tokens) == ([], "max_tokens", 0)
    assert written > 256
    counted = client.messages.count_tokens(model="demo", system=marked, messages=asked("Hi", 0)["messages"])
    assert warm.usage.input_tokens + written == counted.input_tokens

    def reads() -> bool:
        usage = client.messages.create(**asked("When is it due?", 8)).usage
        return usage.cache_read_input_tokens >= written and usage.cache_creation_input_tokens == 0

    eventually(reads)
    with client.messages.stream(**asked("How much?", 8)) as stream:
        streamed = stream.get_final_message()
    assert streamed.content[0].text == client.messages.create(**asked("How much?", 8)).content[0].text


def test_saves_are_hits_without_the_flag_until_the_budget_is_full(served: Served) -> None:
    """A save over the budget is answered, whole or streamed, with an explanatory header. (docs: caching)"""
    save = {"save_system_prompt_kv_cache": True}

    def ask(number: int, question: str, **more: object) -> httpx.Response:
        messages = said(("system", f"Save {number}. {CLERK}"), ("user", question))
        body = {"model": "demo", "messages": messages, "max_tokens": 2, **more}
        return served.post(CHAT, "initech", **body).raise_for_status()

    def cached(answer: httpx.Response) -> int:
        assert "x-warmpath-warning" not in answer.headers
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    cached(ask(0, "When is it due?", **save))
    eventually(lambda: cached(ask(0, "And how much?")) > 400)
    assert cached(ask(0, "Who?", **save)) > 400
    warned: dict[bool, str] = {}
    for number in range(1, 100):
        stream = number % 2 == 1
        answer = ask(number, "Due?", stream=stream, **save)
        assert not stream or answer.text.endswith("data: [DONE]\n\n")
        if "x-warmpath-warning" in answer.headers:
            warned[stream] = answer.headers["x-warmpath-warning"]
        if len(warned) == 2:
            break
    assert all("that your saves hold" in warned[stream] for stream in (False, True))
    eventually(lambda: any(replica["blocks_pinned"] for replica in served.replicas().values()))


def test_concurrent_prompts_find_their_replica(served: Served) -> None:
    """Many clients share ten system prompts in random order; nearly all but the first request of each are hits."""
    prompts = [f"Assistant number {number}. " + "Follow the house rules closely. " * 90 for number in range(10)]
    for prompt in prompts:
        served.chat("globex", ("system", prompt), ("user", "warm"))
        served.wait_until_held("globex", 100, ("system", prompt), ("user", "warm"))
    order = prompts * 6
    random.Random(3).shuffle(order)
    with ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(lambda item: served.chat("globex", ("system", item[1]), ("user", f"question {item[0]}")),
                     enumerate(order))
        )  # fmt: skip
    assert sum(cached > 100 for _, cached, _ in answers) >= 0.95 * len(answers)


def test_tiers_go_all_the_way(served: Served) -> None:
    """Tiers reach the replica and come back, up to the widest range of orders."""
    client, fields = served.openai(), {"model": "demo", "max_tokens": 4, "messages": said(("user", "Hi"))}
    for tier, priority in (("flex", 2**31 - 1), ("priority", -(2**31)), ("auto", 0)):
        asked: Any = {**fields, "service_tier": tier, "extra_body": {"priority": priority}}
        answer = client.chat.completions.create(**asked)
        assert answer.usage.completion_tokens and answer.service_tier == {"auto": "default"}.get(tier, tier)
