"""Bodies with very many parts: what reads them takes as long as they are long, and no square of it."""

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest

from serve_app.api.anthropic.request import parse_messages
from serve_app.api.openai.request import parse_chat
from serve_app.api.openai.responses.request import parse_response_request
from serve_app.api.request import ChatRequest
from serve_app.errors import InvalidRequest
from serve_app.tokenization.chat_template import OTHER_WORDS
from serve_app.tokenization.repairs import REPAIRS, left_out
from tests.harness.growth import grows_too_fast

MARK = {"prompt_cache_breakpoint": {"mode": "explicit"}}
THOUGHT = {"type": "thinking", "thinking": "a" * 64, "signature": ""}


def chat(messages: list[Any]) -> ChatRequest:
    return parse_chat(json.dumps({"model": "m", "messages": messages}).encode())


def respond(items: list[Any]) -> ChatRequest:
    return parse_response_request(json.dumps({"model": "m", "input": items}).encode())


def message(content: list[Any]) -> ChatRequest:
    told = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": content},
        {"role": "user", "content": "?"},
    ]
    return parse_messages(json.dumps({"model": "m", "max_tokens": 1, "messages": told}).encode())


def item(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


CALL = item("function_call", name="f", arguments="{}", call_id="c")
SAID = {"type": "message", "role": "assistant", "content": "a" * 64}
REASONING = item("reasoning", content=[{"type": "reasoning_text", "text": "a" * 64}], summary=[])


def called(size: int) -> list[Any]:
    calls = [{"id": f"c{at}", "type": "function", "function": {"name": "f", "arguments": "{}"}} for at in range(size)]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "r"} for call in reversed(calls)]
    return [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": calls}, *results]


def called_often(size: int) -> list[Any]:
    return [{"role": "user", "content": "Hi"}, *(one for _ in range(size // 2) for one in called(2)[1:])]


@pytest.mark.parametrize(
    "work",
    [
        lambda n: chat([{"role": "user", "content": [{"type": "text", "text": "a", **MARK}] * n}]),
        lambda n: respond([{"role": "user", "content": [{"type": "input_text", "text": "a", **MARK}] * n}]),
        lambda n: message([THOUGHT] * n),
        lambda n: message([THOUGHT, {"type": "text", "text": "a"}] * (n // 2)),
        lambda n: respond([CALL, *[item("function_call_output", output="a")] * n]),
        lambda n: respond([*[CALL] * (n // 2), *[item("function_call_output", output="a")] * (n // 2)]),
        lambda n: respond([CALL, *[SAID] * n]),
        lambda n: respond([REASONING, CALL] * (n // 2)),
        lambda n: respond([REASONING] * n),
    ],
)
def test_reading_is_linear(work: Callable[[int], Any]) -> None:
    """Thousands of parts; the squares of them took from ten seconds to gigabytes."""
    assert not grows_too_fast(work, 16_000)


@functools.cache
def messages_of(made: Callable[[int], list[Any]], size: int) -> list[Any]:
    """Return what every repair gets, read once."""
    return chat(made(size)).messages


@pytest.mark.parametrize("made", [called, called_often, lambda n: [{"role": "user", "content": "a" * 64}] * n])
@pytest.mark.parametrize("name", REPAIRS)
def test_mending_is_linear(name: str, made: Callable[[int], list[Any]]) -> None:
    """For templates that know less than a conversation holds."""
    told = {size: messages_of(made, size) for size in (2_000, 8_000)}
    assert not grows_too_fast(lambda size: REPAIRS[name].mend(told[size]), 8_000, 8_000)


def test_the_look_for_what_a_template_leaves_out_gives_up() -> None:
    """Where one text stands far from its place, all later ones would be searched from the start."""

    def looked(size: int) -> None:
        words = [f"w{at:05}" for at in range(size)]
        text = "".join(f"<user>{word}{'.' * 100}" for word in [*words, "moved"])
        assert left_out([{"role": "user", "content": word} for word in ["moved", *words]], text) is None

    assert not grows_too_fast(looked, 16_000)
    messages = [{"role": "user", "content": word} for word in ["moved", "w00000", "w00001"]]
    assert left_out(messages, f"<user>w00001{'.' * 100}<user>moved") == 1
    assert left_out([OTHER_WORDS, *messages], f"<user>w00000<user>w00001{'.' * 100}<user>moved") is None


@pytest.mark.parametrize("depth", [8, 100, 900])
def test_thoughts_in_thoughts_are_no_error_of_ours(depth: int) -> None:
    """However deep they are nested, they are read, or refused."""
    content = '[{"type": "thinking", "thinking": ' * depth + '"a"' + "}]" * depth
    try:
        body = f'{{"model": "m", "messages": [{{"role": "user", "content": {content}}}]}}'
        assert parse_chat(body.encode()).messages[0]["content"] == "a"
    except InvalidRequest as refused:
        assert depth > 8 and "nested" in refused.message
