"""Calls running in a replica: a step sends one message to each ingress, and every call has one end."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from unittest.mock import MagicMock

import pytest
import ray
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from ray.exceptions import RpcError

from serve_app.engine.protocol import EngineOutput, FirstToken, Prefilled, ReplyTo
from serve_app.replica import running_calls
from serve_app.replica.running_calls import STOPPING, RunningCall, RunningCalls, actor_lives
from serve_app.replica.token_channel import TokenStream
from tests.serve_app.engine.tiny import request

pytestmark = pytest.mark.anyio

INGRESSES = (ReplyTo("one"), ReplyTo("two"))


class Sender:
    """Records messages; refuses them after ``full``."""

    def __init__(self) -> None:
        self.messages: list[tuple[ReplyTo, list[EngineOutput]]] = []
        self.full = False

    def send(self, to: ReplyTo, chunks: Sequence[EngineOutput]) -> bool:
        if not self.full:
            self.messages.append((to, list(chunks)))
        return not self.full


def opened() -> tuple[RunningCalls, Sender, list[str]]:
    """Return a replica's calls, their messages, and the requests that they cancel."""
    sender, cancelled = Sender(), list[str]()
    return RunningCalls(sender, cancelled.append), sender, cancelled  # type: ignore[arg-type]


def begin(calls: RunningCalls, call_id: str, reply_to: ReplyTo, stream: TokenStream, caller: str = "") -> RunningCall:
    return calls.begin(structs.replace(request(call_id, [0]), reply_to=reply_to, caller=caller), stream)


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True), max_size=20), st.data())
async def test_every_token_is_sent_once_in_order(steps: list[list[int]], data: st.DataObject) -> None:
    """For any calls per step: one message per ingress and step, and numbered chunks."""
    calls, sender, _ = opened()
    interval_s = data.draw(st.sampled_from([0.0, 1000.0]))
    running = {
        str(n): begin(calls, str(n), INGRESSES[n % 2], TokenStream(interval_s if n % 3 == 0 else 0.0)) for n in range(6)
    }
    wanted: dict[str, list[int]] = {name: [] for name in running}
    for number, step in enumerate(steps):
        before = len(sender.messages)
        for n in step:
            wanted[str(n)].append(number)
        calls.deliver([EngineOutput(str(n), (number,)) for n in step])
        assert len({to for to, _ in sender.messages[before:]}) == len(sender.messages) - before <= 2
    calls.deliver([EngineOutput(name, (), finish_reason="length") for name in running])
    sent: dict[str, list[int]] = {name: [] for name in running}
    chunks_of = Counter[str]()
    for to, chunks in sender.messages:
        for chunk in chunks:
            name = chunk.request_id
            assert to == INGRESSES[int(name) % 2] and chunk.seq == chunks_of[name]
            chunks_of[name] += 1
            sent[name] += chunk.token_ids
    assert sent == wanted
    for name, call in running.items():
        assert call.end.result() == EngineOutput(name, seq=chunks_of[name], finish_reason="length")


async def test_calls_of_a_full_ingress_end_and_can_be_sent_elsewhere() -> None:
    """An ingress is too far behind: its calls are cancelled, and report the number of chunks sent. Others continue."""
    calls, sender, cancelled = opened()
    running = {name: begin(calls, name, INGRESSES[0], TokenStream()) for name in ("a", "b")}
    calls.deliver([EngineOutput("a", (1, 2)), EngineOutput("b", (3,))])
    sender.full = True
    calls.deliver([EngineOutput("a", (4,)), EngineOutput("b", (5,), finish_reason="stop")])
    lost = running["a"].end.result()
    assert (lost.error, lost.seq, cancelled) == ("unavailable", 1, ["a"])
    ended = running["b"].end.result()
    # It had ended: its ingress misses one chunk of the two, and requests the rest.
    assert (ended.error, ended.finish_reason, ended.seq) == ("", "stop", 2)


async def test_failures_are_ends_and_no_message() -> None:
    """The failures are an engine's error and a timeout; a leaving replica breaks off running calls."""
    calls, sender, cancelled = opened()
    running = {name: begin(calls, name, INGRESSES[0], TokenStream()) for name in ("a", "b", "c", "g")}
    failed = [
        EngineOutput("a", finish_reason="error", error="failed", message="broken"),
        EngineOutput("b", finish_reason="timeout", error="timeout", message="too long"),
        EngineOutput("g", finish_reason="error", error="grammar", message="too much work"),
        EngineOutput("unknown", (1,)),
    ]
    calls.deliver(failed)
    assert not sender.messages
    calls.break_off()
    ends = {name: call.end.result() for name, call in running.items()}
    assert {name: (end.error, end.message) for name, end in ends.items()} == {
        "a": ("failed", "broken"), "b": ("timeout", "too long"), "c": ("unavailable", STOPPING),
        "g": ("grammar", "too much work"),
    }  # fmt: skip
    assert not calls and "c" in cancelled
    late = begin(calls, "d", INGRESSES[0], TokenStream())
    calls.deliver([EngineOutput("d", finish_reason="error", error="failed", message="the engine was stopped")])
    assert late.end.result().error == "unavailable", "another replica can take it over"


async def test_requests_of_a_dead_caller_end_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes requests that the engine has not taken yet; without requests nobody is watched."""
    monkeypatch.setattr(running_calls, "LOOK_EVERY_S", 0.0)
    dead: set[str] = set()
    asked: list[str] = []

    async def looked() -> None:
        """Wait until everybody has been checked twice from now on."""
        before = asked.count("a")
        while asked.count("a") < before + 2:  # noqa: ASYNC110 (each look is a turn of the loop)
            await asyncio.sleep(0)

    calls, _, cancelled = opened()
    watching = asyncio.create_task(calls.watch(lambda name: bool(asked.append(name)) or name not in dead))
    for caller, call_id in (("a", "a1"), ("b", "b1"), ("b", "b2"), ("b", "over"), ("gone", "g")):
        begin(calls, call_id, INGRESSES[0], TokenStream(), caller)
    calls.forget("over")
    calls.forget("g")
    await looked()
    assert not cancelled
    dead.add("b")
    for _ in range(2):  # not taken yet: once more
        cancelled.clear()
        await looked()
        assert set(cancelled) == {"b1", "b2"}
    calls.forget("b1")
    calls.forget("b2")
    await looked()
    cancelled.clear()
    await looked()
    assert not cancelled
    assert "gone" not in asked
    watching.cancel()


@pytest.mark.parametrize(("said", "lives"), [(None, True), (ValueError("no such actor"), False), (RpcError("x"), True)])
def test_nobody_is_dead_while_ray_does_not_say_so(
    said: Exception | None, lives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Generations do not end because Ray's control plane is away."""
    monkeypatch.setattr(ray, "get_actor", MagicMock(side_effect=said))
    assert actor_lives("x") is lives


async def test_requests_that_nobody_waits_for_end_whether_they_have_begun_or_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This includes requests that the engine has not taken yet; other names continue, and ended ones are forgotten."""
    monkeypatch.setattr(running_calls, "LOOK_EVERY_S", 0.0)
    calls, _, cancelled = opened()
    watching = asyncio.create_task(calls.watch(lambda _: True))

    def opens(call_id: str) -> None:
        begin(calls, call_id, INGRESSES[0], TokenStream())

    opens("here")
    opens("other")
    calls.leave(["here", "coming"])
    assert cancelled == ["here"]
    while cancelled.count("here") < 3:  # noqa: ASYNC110 (each look is a turn of the loop)
        await asyncio.sleep(0)
    calls.forget("here")
    cancelled.clear()
    opens("coming")
    while cancelled.count("coming") < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    calls.forget("coming")
    cancelled.clear()
    opens("coming")
    calls.leave([])
    assert not cancelled
    calls.leave([str(number) for number in range(20_000)])
    opens("0")
    opens("19999")
    calls.leave([])
    assert set(cancelled) == {"19999"}
    watching.cancel()


async def test_what_was_computed_for_an_abandoned_prompt_is_told_once_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order of its end, of being forgotten and of the question; None for one that the engine never had."""
    calls, _, _ = opened()
    for name in ("ended", "running", "answered", "unsubmitted"):
        begin(calls, name, INGRESSES[0], TokenStream())
        if name != "unsubmitted":
            calls.submitted(name)
    calls.forget("ended")
    calls.deliver([EngineOutput("ended", finish_reason="cancelled", prefilled=Prefilled(96, 32))])
    calls.deliver([EngineOutput("answered", (1,), first=FirstToken(64))])
    calls.deliver([EngineOutput("answered", (2,), finish_reason="length", prefilled=Prefilled(100, 64))])
    calls.forget("answered")
    asked = asyncio.create_task(calls.prefilled(["ended", "running", "answered", "unsubmitted", "unknown"]))
    await asyncio.sleep(0)
    assert not asked.done()
    calls.forget("running")
    calls.deliver([EngineOutput("running", finish_reason="cancelled", prefilled=Prefilled(16, 0))])
    assert await asked == [(96, 32), (16, 0), (100, 64), None, None]
    assert await calls.prefilled(["ended"]) == [None], "it is told once"
    monkeypatch.setattr(running_calls, "END_S", 0.01)
    for number in range(20_000):
        calls.submitted(str(number))
    assert await calls.prefilled(["0", "19999"]) == [None, None], "forgotten, and one whose end does not come"


def test_between_first_and_last_outputs_leave_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ten steps of 30 ms, ten outputs leave without an interval, four with 100 ms; no token is lost or moved."""

    def leaving(interval_s: float) -> list[list[int]]:
        now_s = 50.0
        monkeypatch.setattr("serve_app.replica.token_channel.time.monotonic", lambda: now_s)
        stream, left = TokenStream(interval_s), []
        for token in range(10):
            ready = stream.push(EngineOutput("r", (token,), finish_reason="length" if token == 9 else None))
            if ready is not None:
                left.append(list(ready.token_ids))
            now_s += 0.03
        return left

    assert leaving(0.0) == [[token] for token in range(10)]
    assert leaving(0.1) == [[0], [1, 2, 3, 4], [5, 6, 7, 8], [9]]
