"""Explicit saves over HTTP with the real OpenAI client: saved, reused without the flag, no-ops, budget overflow."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI

from benchmarks.common.server import instance
from tests.integration.conftest import PATIENCE_S, alone, cache_state, eventually

pytestmark = pytest.mark.integration

SAVE = {"save_system_prompt_kv_cache": True}
RULES = "You are a careful clerk. " + "Name the clause, the date and the amount before any advice. " * 20


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """One replica with a pin budget that two of the system prompts fill."""
    with alone(
        instance(
            "--model",
            "demo",
            "--replicas",
            "1",
            "--set",
            "dtype=float32",
            "--set",
            "num_blocks=256",
            "--set=pin_budget=60",
        )
    ) as base:
        yield base


def ask(client: OpenAI, system: str, question: str, **body: Any) -> tuple[int, str, str | None]:
    """Return cached tokens, the answer and the warning header."""
    raw = client.chat.completions.with_raw_response.create(
        model="demo",
        messages=[{"role": "system", "content": system}, {"role": "user", "content": question}],
        max_tokens=6,
        temperature=0,
        extra_body=body,
    )
    answer = raw.parse()
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return (
        answer.usage.prompt_tokens_details.cached_tokens or 0,
        answer.choices[0].message.content or "",
        raw.headers.get("x-warmpath-warning"),
    )


def fill_the_pool(client: OpenAI) -> None:
    """Send more tokens than the pool holds, all different."""
    for i in range(7):
        text = f"{i} " + " ".join(str(i * 7919 + j) for j in range(150))
        client.completions.create(model="demo", prompt=text, max_tokens=1, temperature=0)


def saves(url: str) -> dict[str, float]:
    """Outcomes counted so far, once the replica has reported."""
    return {
        line.split('outcome="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1])
        for line in httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text.splitlines()
        if line.startswith("warmpath_prompt_saves_total{")
    }


def test_a_save_is_hit_by_later_requests_without_the_flag(client: OpenAI, url: str) -> None:
    """Through a churn that evicts everything else; the answers are those of an empty cache."""
    system = "First. " + RULES
    first, text, warning = ask(client, system, "When is it due?", **SAVE)
    assert (first, warning) == (0, None)
    fresh, fresh_text, _ = ask(client, system, "When is it due?", cache_salt="elsewhere")
    assert (fresh, fresh_text) == (0, text)
    fill_the_pool(client)
    later, _, _ = ask(client, system, "And how much?")
    assert later > 100
    unsaved, _, _ = ask(client, system, "And how much?", cache_salt="elsewhere")
    assert unsaved == 0, "the churn did evict what was not saved"


def test_no_ops(client: OpenAI, url: str) -> None:
    """Saving again, and saving no system prompt, change nothing and warn of nothing."""
    system = "First. " + RULES
    ask(client, system, "Who?", **SAVE)
    cached, _, warning = ask(client, system, "Who else?", **SAVE)
    assert cached > 100
    assert warning is None
    raw = client.chat.completions.with_raw_response.create(
        model="demo", messages=[{"role": "user", "content": "Hi"}], max_tokens=2, extra_body=SAVE
    )
    assert "x-warmpath-warning" not in raw.headers
    done = client.completions.with_raw_response.create(model="demo", prompt="Hi", max_tokens=2, extra_body=SAVE)
    assert "x-warmpath-warning" not in done.headers


def test_a_save_over_the_budget_warns_and_is_answered(client: OpenAI, url: str) -> None:
    """Whole or streamed: the header says why, the counter counts, the answer is there."""
    warning = None
    for number in range(4):
        _, text, warning = ask(client, f"Prompt {number}. " + RULES, "Due?", **SAVE)
        assert text
    assert warning is not None
    told = re.search(r"it needs (\d+) tokens of KV beside the (\d+) that your saves hold, .*\) is (\d+)$", warning)
    assert told is not None, warning
    needed, held, budget = map(int, told.groups())
    assert budget == 60 * 16 and 0 < held <= budget < needed + held
    with client.chat.completions.with_streaming_response.create(
        model="demo",
        messages=[{"role": "system", "content": "Streamed. " + RULES}, {"role": "user", "content": "Due?"}],
        max_tokens=4,
        stream=True,
        extra_body=SAVE,
    ) as response:
        assert "pin budget" in response.headers["x-warmpath-warning"]
        assert b"[DONE]" in b"".join(response.iter_bytes())
    eventually(lambda: saves(url).get("over_budget", 0) >= 2 and cache_state(url)["replicas"][0]["blocks_pinned"] > 0)
    replica = cache_state(url)["replicas"][0]
    assert 0 < replica["blocks_pinned"] <= 60
    assert replica["bytes_pinned"] % replica["blocks_pinned"] == 0
    assert replica["bytes_by_tenant"]["default"] >= replica["bytes_pinned"]
    assert httpx.post(f"{url}/reset_prefix_cache", timeout=PATIENCE_S).json() == {"complete": True}
    assert ask(client, "First. " + RULES, "Who?")[0] == 0
