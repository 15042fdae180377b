"""Loops of agents' clients of today, recorded: no request is refused, and each turn keeps the prompt before it."""

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.protocol.block_hash import TokenArray, common_tokens
from serve_app.api.agent_rules import by_rules
from serve_app.api.anthropic.request import parse_messages
from serve_app.api.openai.request import parse_chat
from serve_app.api.openai.responses.request import parse_response_request
from serve_app.api.request import ChatRequest
from serve_app.generation.prepare import Preparer
from serve_app.tenants import Tenant
from tests.clients.shapes import requests_of
from tests.clients.turns import BLOCK, RECORDED, preparer_of
from tests.harness.growth import grows_too_fast
from tests.serve_app.tool_templates.families import family


@pytest.fixture(scope="module")
def preparer(demo_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Preparer:
    return preparer_of(family("hermes", demo_model_path, tmp_path_factory.mktemp("turns") / "hermes"))


def either(body: bytes) -> ChatRequest:
    return parse_response_request(body) if "input" in json.loads(body) else parse_chat(body)


def breaks(preparer: Preparer, requests: list[ChatRequest], *, rules: bool = True) -> dict[int, float]:
    """Return the turns that lose blocks of the earlier prompt that they are nearest to, and the part that they keep."""
    found: dict[int, float] = {}
    prompts: list[TokenArray] = []
    for number, request in enumerate(requests):
        ids = asyncio.run(preparer.prompts.token_ids(by_rules(request) if rules else request, Tenant("t")))
        common, _, before = max(
            ((common_tokens(ids, one) // BLOCK, at, one) for at, one in enumerate(prompts)), default=(0, 0, ids[:0])
        )
        whole = len(before) // BLOCK
        if whole - common > 1:  # its last block has the beginning of an answer
            found[number] = round(common / whole, 1)
        prompts.append(ids)
    return found


@pytest.mark.parametrize(
    ("client", "parse", "ignored", "broken"),
    [
        ("claude_code_2.1.332", parse_messages, [], [4, 18]),
        (
            "codex_0.171.0",
            parse_response_request,
            ["tools[].external_web_access", "tools[].web_search"],
            [3, 16, 17, 18, 19, 20, 22],
        ),
        ("qwen_code_0.24.4", parse_chat, [], [4, 17]),  # a change in git, behind system prompt and tools
        ("opencode_1.18.33", parse_chat, [], [1, 5, 20, 21]),
        ("openai_agents_0.24.0", either, [], [3, 20, 23, 24]),
    ],
)
def test_each_turn_keeps_the_prompt_before_it(
    client: str, parse: Callable[[bytes], ChatRequest], ignored: list[str], broken: list[int], preparer: Preparer
) -> None:
    """Except a sub-agent's first, the first after a compaction, and what the page of agents names."""
    requests = [parse(json.dumps(body).encode()) for _, body in requests_of(RECORDED / f"{client}.json")]
    assert len(requests) >= 15
    assert {field.with_meaning for request in requests for field in request.unknown} == {*ignored}
    assert [*breaks(preparer, requests)] == broken


def test_a_resumed_conversation_keeps_what_is_before_a_change_in_git(preparer: Preparer) -> None:
    """Qwen Code tells the state in the middle of its system prompt, before which templates have little."""
    bodies: list[Any] = [json.dumps(body).encode() for _, body in requests_of(RECORDED / "qwen_code_0.24.4.json")]
    turns = [parse_chat(body) for body in bodies[16:18]]
    assert breaks(preparer, turns, rules=False)[1] < 0.5 < 0.7 <= breaks(preparer, turns)[1]
    (plain, ruled) = turns[0], by_rules(turns[0])
    assert ruled.prompt_rules == ("git_snapshot",)
    words = [" ".join(str(message["content"]) for message in one.messages).split() for one in (plain, ruled)]
    assert sorted(words[0]) == sorted(words[1])


def test_marks_move_with_the_words_that_they_follow() -> None:
    """A mark in the system prompt covers what is left there; one without a snapshot stays as it is."""
    snapshot = "Git snapshot at conversation start. Frozen.\n```text\ngit: Status:\n```\n\n"
    mark = {"type": "ephemeral"}
    system = [{"type": "text", "text": f"Be brief.\n{snapshot}Be kind.", "cache_control": mark}]
    user = {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": mark}]}
    body = {"model": "m", "max_tokens": 5, "system": system, "messages": [user]}
    request = by_rules(parse_messages(json.dumps(body).encode()))
    assert [message["content"] for message in request.messages] == ["Be brief.\nBe kind.", f"Hi\n\n{snapshot.rstrip()}"]
    first, second = request.breakpoints
    assert first.messages == request.messages[:1] and second.messages == request.messages
    other = parse_messages(json.dumps({**body, "system": "Be brief."}).encode())
    assert by_rules(other) is other


_LINES = (
    "Git snapshot at conversation start.",
    " Frozen.",
    "\n",
    "```text",
    "git:",
    " a",
    "```",
    "\n```text\n",
    "git: b\n",
)
_PLAIN = re.compile(r"Git snapshot at conversation start\.[^\n]*\n```text\n(?:git:[^\n]*\n)*```\n*")


def _asked(texts: list[str]) -> ChatRequest:
    """Return a request whose system prompt has these blocks, with a mark at each of the first four."""
    mark = {"type": "ephemeral"}
    system = [
        {"type": "text", "text": text, **({"cache_control": mark} if at < 4 and text else {})}
        for at, text in enumerate(texts)
    ]
    body = {"model": "m", "max_tokens": 5, "system": system, "messages": [{"role": "user", "content": "Hi"}]}
    return parse_messages(json.dumps(body).encode())


@given(st.lists(st.lists(st.sampled_from(_LINES), max_size=9).map("".join), min_size=1, max_size=5))
def test_the_snapshot_is_found_as_by_a_plain_search(texts: list[str]) -> None:
    """A slow search by one pattern, again for each mark, says the same of any lines."""
    request = _asked(texts)
    ruled, system = by_rules(request), "".join(texts)
    if (found := _PLAIN.search(system)) is None:
        assert ruled is request
        return
    kept = [system[: found.start()] + system[found.end() :], f"Hi\n\n{found.group().rstrip()}"]
    assert [message["content"] for message in ruled.messages] == kept
    for before, after in zip(request.breakpoints, ruled.breakpoints, strict=True):
        assert [one["content"] for one in after.messages] == [_PLAIN.sub("", before.messages[0]["content"], count=1)]
    off = by_rules(request, follow=False)
    assert off.messages is request.messages and off.rules_off == ruled.prompt_rules == ("git_snapshot",)


@pytest.mark.parametrize("line", ["{0}", "{0}\n```text\n", "{0}\n```text\ngit:\n", "{0}\n```text\ngit: {0}\n"])
def test_a_prompt_that_repeats_the_rules_words_takes_no_longer_than_another(line: str) -> None:
    """Eight megabytes of them, with marks: they took half an hour, in the loop of all requests."""
    text = line.format("Git snapshot at conversation start.")

    def ruled(size: int) -> None:
        request = _asked([text * (size // len(text))] * 4)
        by_rules(request)
        by_rules(request, follow=False)

    assert not grows_too_fast(ruled, 2 << 20, 1024)


def test_without_its_rules_a_tool_that_is_found_breaks_the_prefix(preparer: Preparer) -> None:
    """Claude Code loads tools in the middle of a conversation, into the list that templates show first."""
    bodies: list[Any] = [json.dumps(body).encode() for _, body in requests_of(RECORDED / "claude_code_2.1.332.json")]
    assert breaks(preparer, [parse_messages(body, follow_rules=False) for body in bodies[10:12]])[1] < 0.5
