"""Bodies with very many parts: what reads them takes as long as they are long, and no square of it."""

import json
import time
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
CALLS = [{"id": f"c{at}", "type": "function", "function": {"name": "f", "arguments": "{}"}} for at in range(8000)]
RESULTS = [{"role": "tool", "tool_call_id": call["id"], "content": "r"} for call in reversed(CALLS)]
MANY = ({"role": "user", "content": "a" * 64},) * 30_000
CALLED: list[Any] = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": CALLS}, *RESULTS]


@pytest.mark.parametrize(
    "work",
    [
        lambda: chat([{"role": "user", "content": [{"type": "text", "text": "a", **MARK}] * 30_000}]),
        lambda: respond([{"role": "user", "content": [{"type": "input_text", "text": "a", **MARK}] * 30_000}]),
        lambda: message([THOUGHT] * 30_000),
        lambda: message([THOUGHT, {"type": "text", "text": "a"}] * 15_000),
        lambda: respond([CALL, *[item("function_call_output", output="a")] * 30_000]),
        lambda: respond([*[CALL] * 20_000, *[item("function_call_output", output="a")] * 20_000]),
        lambda: respond([CALL, *[SAID] * 30_000]),
        lambda: respond([REASONING, CALL] * 15_000),
        *(lambda repair=repair: repair.mend(chat(CALLED).messages) for repair in REPAIRS.values()),
        *(lambda repair=repair: repair.mend(MANY) for repair in REPAIRS.values()),
    ],
)  # fmt: skip
def test_reading_is_linear(work: Callable[[], Any]) -> None:
    """Thousands of parts take a second on a slow machine; the squares of them took from ten to gigabytes."""
    begun_s = time.process_time()
    work()
    assert time.process_time() - begun_s < 5


def test_the_look_for_what_a_template_leaves_out_gives_up() -> None:
    """Where one text stands far from its place, all later ones would be searched from the start."""
    words = [f"w{at:05}" for at in range(20_000)]
    messages = [{"role": "user", "content": word} for word in ["moved", *words]]
    text = "".join(f"<user>{word}{'.' * 100}" for word in [*words, "moved"])
    begun_s = time.process_time()
    assert left_out(messages, text) is None
    assert time.process_time() - begun_s < 5
    assert left_out(messages[:3], text.replace(words[1], "")) == 2
    assert left_out([OTHER_WORDS, *messages[1:]], text) is None


@pytest.mark.parametrize("depth", [8, 100, 900])
def test_thoughts_in_thoughts_are_no_error_of_ours(depth: int) -> None:
    """However deep they are nested, they are read, or refused."""
    part: Any = "a"
    for _ in range(depth):
        part = [{"type": "thinking", "thinking": part}]
    try:
        assert chat([{"role": "user", "content": part}]).messages[0]["content"] == "a"
    except InvalidRequest as refused:
        assert depth > 8 and "nested" in refused.message
