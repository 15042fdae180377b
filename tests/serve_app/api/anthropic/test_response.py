"""Laws of messages: every prompt token is counted once, and the events of a stream build the whole answer."""

import json
import re
from functools import partial
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from serve_app.api.anthropic.history import MAX_MESSAGES, MessageHistory, RequestDigests, digest, digests
from serve_app.api.anthropic.response import MessagesFormat
from serve_app.api.format import AnswerHead, ApiFinishReason, Choice, Usage
from serve_app.api.tool_calls import CallArguments, CallBegun, CallEnded, ToolCall
from serve_app.engine.protocol import Save
from serve_app.generation.request_usage import kept_tokens

ASKED = RequestDigests(b"m", b"s", b"t", (b"1",))
HEAD = AnswerHead("1", 0, "demo", repeated={"diagnostics": ASKED})
ARGUMENTS = st.dictionaries(st.text(max_size=5), st.integers(), max_size=3)


def fresh_format() -> MessagesFormat:
    return MessagesFormat(partial(MessageHistory().compare, "acme"))


def built(raw: bytes) -> dict[str, Any]:
    """Build a message as Anthropic's clients do; fail if events are out of order or misnamed."""
    shown = []
    for event in raw.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        shown.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {shown[-1]['type']}"
    kinds = " ".join(event["type"] for event in shown).replace("content_block_", "")
    assert re.fullmatch("message_start( start( delta)* stop)* message_delta message_stop", kinds)
    message: dict[str, Any] = shown[0]["message"]
    assert message["content"] == []
    for event in shown[1:-2]:
        if event["type"] == "content_block_start":
            message["content"].append(event["content_block"])
            parts: list[str] = []
        elif event["type"] == "content_block_delta":
            parts.append(event["delta"].get("text") or event["delta"].get("partial_json"))
        elif message["content"][-1]["type"] == "text":
            message["content"][-1]["text"] = "".join(parts)
        elif parts:
            message["content"][-1]["input"] = json.loads("".join(parts))
        assert event["index"] == len(message["content"]) - 1
    message |= shown[-2]["delta"]
    message["usage"] |= shown[-2]["usage"]
    return message


@given(
    st.text(max_size=20),
    st.lists(st.tuples(st.text(min_size=1, max_size=8), ARGUMENTS), max_size=3),
    st.sampled_from(["stop", "length", "tool_calls"]),
    st.sampled_from(["", "END"]),
    st.integers(1, 9),
)
def test_a_stream_builds_the_whole_answer(
    text: str, called: list[tuple[str, dict[str, int]]], reason: ApiFinishReason, stop: str, step: int
) -> None:
    usage = Usage(100, 7, 32, 16, 16)
    stream = fresh_format().stream(HEAD)
    raw = stream.opening(0, Usage(100, 1, 32, 16, 16))
    for at in range(0, len(text), step):
        raw += stream.text(0, text[at : at + step])
    calls = []
    for number, (name, arguments) in enumerate(called):
        raw += stream.call(0, CallBegun(f"call_{number}", name))
        encoded = json.dumps(arguments)
        calls.append(ToolCall(f"call_{number}", name, encoded))
        for at in range(0, len(encoded), step):
            raw += stream.call(0, CallArguments(encoded[at : at + step]))
        raw += stream.call(0, CallEnded(encoded))
    raw += stream.finish(0, reason, stop) + stream.usage(usage)
    whole = fresh_format().whole(HEAD, [Choice(text, reason, tuple(calls), stop_sequence=stop)], usage)
    assert built(raw) == whole


@given(
    st.lists(st.tuples(st.integers(1, 64), st.sampled_from([300.0, 3600.0])), max_size=4),
    st.integers(0, 64),
    st.integers(0, 100),
)
def test_every_token_of_a_prompt_is_counted_once(
    marks: list[tuple[int, float]], cached_blocks: int, more_tokens: int
) -> None:
    """A token is read, written for minutes, written for an hour, or neither; the longest time counts. (docs: api)"""
    keep = [Save(b"", blocks * 16, ttl_s) for blocks, ttl_s in marks]
    cached = cached_blocks * 16
    prompt = max([cached, *(kept.tokens for kept in keep)]) + more_tokens
    kept_5m, kept_1h = kept_tokens(keep, cached)
    body = fresh_format().whole(HEAD, [Choice("", "stop")], Usage(prompt, 1, cached, kept_5m, kept_1h))
    usage = body["usage"]
    parts = (usage["input_tokens"], usage["cache_creation_input_tokens"], usage["cache_read_input_tokens"])
    assert min(parts) >= 0
    assert sum(parts) == prompt
    assert sum(usage["cache_creation"].values()) == usage["cache_creation_input_tokens"]
    states = ["read" if at < cached else "" for at in range(prompt)]
    for at, state in enumerate(states):
        ttls = [kept.ttl_s for kept in keep if at < kept.tokens]
        if not state and ttls:
            states[at] = "1h" if max(ttls) == 3600 else "5m"
    assert (kept_5m, kept_1h) == (states.count("5m"), states.count("1h"))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.lists(st.integers(0, 3), min_size=1, max_size=5))
def test_messages_changed_unless_they_continue(before: list[int], now: list[int]) -> None:
    """A conversation that begins with all of the earlier one has no reason to miss the cache."""
    history = MessageHistory()
    history.compare("acme", "msg_1", RequestDigests(b"m", b"s", b"t", digests(before)), Usage(100, 1, 0))
    told = history.compare("acme", "msg_2", RequestDigests(b"m", b"s", b"t", digests(now), "msg_1"), Usage(120, 1, 64))
    changed = {"cache_miss_reason": {"type": "messages_changed", "cache_missed_input_tokens": 36}}
    assert told == (None if now[: len(before)] == before else changed)


def test_reasons_come_in_the_order_of_the_prompt_and_histories_are_bounded() -> None:
    """Only the first difference is reported; for forgotten messages or those of other ingresses nothing is guessed."""
    history = MessageHistory()
    history.compare("acme", "msg_1", ASKED, Usage(10, 1, 0))

    def reason(changed: bytes = b"", previous: str = "msg_1", history: MessageHistory = history) -> str:
        fields = [b"x" if field in changed else bytes([field]) for field in b"mst"]
        told = history.compare("acme", "msg_2", RequestDigests(*fields, (b"1",), previous), Usage(10, 1, 0))
        return str(told and told["cache_miss_reason"]["type"])

    reasons = [reason(changed) for changed in (b"mst", b"st", b"t", b"")]
    assert reasons == ["model_changed", "system_changed", "tools_changed", "None"]
    assert reason(previous="msg_0") == "previous_message_not_found"
    assert reason(previous="msg_0", history=MessageHistory(complete=False)) == "unavailable"
    for number in range(MAX_MESSAGES):
        history.compare("zeta", f"msg_z{number}", ASKED, Usage(10, 1, 0))
    assert reason() == "None", "other tenants evict nothing"
    for number in range(MAX_MESSAGES):
        history.compare("acme", f"msg_a{number}", ASKED, Usage(10, 1, 0))
    assert reason() == "previous_message_not_found"
    assert digest("text") != b"text"
