"""The real Anthropic client against the real instance: its caching example, pre-warming and streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic

from tests.integration.conftest import eventually

pytestmark = pytest.mark.integration

RULES = "You are a careful clerk. " + "Name the clause, the date and the amount before any advice. " * 40
MARKED: list[Any] = [{"type": "text", "text": f"Messages. {RULES}", "cache_control": {"type": "ephemeral"}}]

GREEDY = {"temperature": 0.0}
"""The API has it, the client's methods no longer do."""


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Anthropic]:
    with Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def ask(client: Anthropic, question: str, system: Any = MARKED, **more: Any) -> Any:
    return client.messages.create(
        **{"model": "demo", "max_tokens": 8, **more},
        system=system,
        extra_body=GREEDY,
        messages=[{"role": "user", "content": question}],
    )


def total(usage: Any) -> int:
    return int(usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens)


def test_a_marked_prompt_is_written_once_and_read_after(client: Anthropic) -> None:
    """First all of it is created, by a pre-warming request without an answer; then all of it is read.

    docs/clients.md
    """
    warm = ask(client, "Hi", max_tokens=0)
    assert (warm.content, warm.stop_reason) == ([], "max_tokens")
    assert warm.usage.cache_read_input_tokens == 0
    assert warm.usage.cache_creation_input_tokens > 256
    assert warm.usage.cache_creation.ephemeral_5m_input_tokens == warm.usage.cache_creation_input_tokens
    counted = client.messages.count_tokens(model="demo", system=MARKED, messages=[{"role": "user", "content": "Hi"}])
    assert total(warm.usage) == counted.input_tokens

    def reads() -> bool:
        usage = ask(client, "When is it due?").usage
        read_all = usage.cache_read_input_tokens >= warm.usage.cache_creation_input_tokens
        return read_all and usage.cache_creation_input_tokens == 0

    eventually(reads)


def test_a_stream_is_the_whole_answer(client: Anthropic) -> None:
    whole = ask(client, "How much is it?")
    with client.messages.stream(
        model="demo", max_tokens=8, system=MARKED, extra_body=GREEDY,
        messages=[{"role": "user", "content": "How much is it?"}],
    ) as stream:  # fmt: skip
        streamed = stream.get_final_message()
    assert [block.to_dict() for block in streamed.content] == [block.to_dict() for block in whole.content]
    assert streamed.stop_reason == whole.stop_reason
    assert total(streamed.usage) == total(whole.usage)


def test_models_are_anthropics(client: Anthropic) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").display_name == "demo"
