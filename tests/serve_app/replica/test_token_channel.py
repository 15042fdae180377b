"""The channel sends tokens in order, each to its call, encrypted, and never blocks a replica; and the calls."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from unittest.mock import MagicMock

import pytest
import ray
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from ray.exceptions import RpcError

from serve_app.engine import token_channel
from serve_app.engine.protocol import EngineOutput, FirstToken, Prefilled, ReplyTo, TokenLogprob, to_wire
from serve_app.engine.token_channel import Arrivals, TokenReceiver, TokenSender, TokenStream
from serve_app.replica import running_calls
from serve_app.replica.running_calls import STOPPING, RunningCall, RunningCalls, actor_lives
from tests.harness.eventually import let_others_run
from tests.serve_app.engine.tiny import request
from tests.serve_app.generation.outputs import output

pytestmark = pytest.mark.anyio

WITHIN_S = 60.0


@asynccontextmanager
async def both_ends() -> AsyncIterator[tuple[TokenReceiver, TokenSender]]:
    """Both ends in one process, on loopback."""
    receiver, sender = TokenReceiver("127.0.0.1"), TokenSender()
    try:
        async with asyncio.timeout(WITHIN_S):
            yield receiver, sender
    finally:
        await asyncio.to_thread(sender.close)
        receiver.close()


async def tokens_of(arrivals: Arrivals, count: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < count:
        tokens += (await next_of(arrivals)).token_ids
    return tokens


async def next_of(arrivals: Arrivals) -> EngineOutput:
    while (chunk := arrivals.take()) is None:
        await arrivals.news()
    return chunk


async def test_each_call_gets_its_own_chunks_in_order() -> None:
    """Several steps of two calls are sent; chunks for an ended call are dropped."""
    async with both_ends() as (receiver, sender):
        inbox = receiver.inbox
        with inbox.arrivals("a") as first, inbox.arrivals("b") as second:
            for step in range(100):
                chunks = [EngineOutput(call, (step, ord(call[0])), seq=step) for call in ("a", "gone", "b")]
                assert sender.send(inbox.reply_to, chunks)
            for arrivals, name in ((first, "a"), (second, "b")):
                wanted = [token for step in range(100) for token in (step, ord(name))]
                assert await tokens_of(arrivals, 200) == wanted


async def test_a_sender_without_the_key_is_not_heard() -> None:
    """Without encryption or with another ingress' key nothing arrives; with the right key it does."""
    async with both_ends() as (receiver, sender):
        reply_to = receiver.inbox.reply_to
        other_key, _ = zmq.curve_keypair()
        plain = zmq.Context()
        try:
            stranger = plain.socket(zmq.PUSH)
            stranger.setsockopt(zmq.LINGER, 0)
            stranger.connect(reply_to.address)
            forged = [EngineOutput("a", (666,))]
            stranger.send(to_wire(forged), flags=zmq.NOBLOCK)
            with receiver.inbox.arrivals("a") as arrivals:
                sender.send(structs.replace(reply_to, public_key=other_key.decode()), forged)
                for step in range(20):
                    assert sender.send(reply_to, [EngineOutput("a", (step,), seq=step)])
                assert await tokens_of(arrivals, 20) == list(range(20))
                assert arrivals.take() is None
        finally:
            plain.destroy(linger=0)


def test_pending_chunks_are_taken_together_up_to_a_gap() -> None:
    """The result has the first chunk's figures and the last one's end; chunks after a lost one are not taken."""
    arrivals = Arrivals()
    assert arrivals.take() is None
    for seq, finish_reason in enumerate((None, None, "length")):
        arrivals.add(output((seq,), FirstToken(16) if seq == 0 else None, finish_reason=finish_reason, seq=seq))
    assert arrivals.take() == output((0, 1, 2), FirstToken(16), "length")
    arrivals.add(output((4,), seq=4))
    assert (arrivals.take(), arrivals.received) == (None, 3)


def test_a_prompts_logprobs_come_before_the_first_token_and_are_taken_with_it() -> None:
    arrivals, told = Arrivals(), [(TokenLogprob(-1.0, ((3, -1.0),), 1),), (TokenLogprob(-2.0),)]
    for seq, part in enumerate(told):
        arrivals.add(output(prompt_logprobs=part, seq=seq))
    arrivals.add(output((5,), FirstToken(0), seq=2))
    arrivals.add(output((6,), finish_reason="length", seq=3))
    taken = arrivals.take()
    assert taken is not None
    assert (taken.prompt_logprobs, taken.first) == (told[0] + told[1], FirstToken(0))
    assert (taken.token_ids, taken.finish_reason) == ((5, 6), "length")


def test_a_prompts_logprobs_are_not_held_back() -> None:
    """Nor do they hold back the first token, which no output may join."""
    stream = TokenStream(interval_s=1000.0)
    told = EngineOutput("r", prompt_logprobs=(TokenLogprob(-1.0),))
    first = EngineOutput("r", (5,), first=FirstToken(0))
    assert [stream.push(told), stream.push(told), stream.push(first)] == [told, told, first]
    assert stream.push(EngineOutput("r", (6,))) is None


async def test_many_prompts_logprobs_go_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A larger message would end the connection."""
    monkeypatch.setattr(token_channel, "MAX_MESSAGE_BYTES", 4000)
    told = tuple(TokenLogprob(-float(i)) for i in range(100))
    async with both_ends() as (receiver, sender):
        with receiver.inbox.arrivals("a") as first, receiver.inbox.arrivals("b") as second:
            chunks = [EngineOutput(call, prompt_logprobs=told, seq=seq) for seq in range(20) for call in "ab"]
            assert len(to_wire(chunks)) > 30_000
            assert sender.send(receiver.inbox.reply_to, chunks)
            for arrivals in (first, second):
                got: list[TokenLogprob] = []
                while len(got) < 2000:
                    got += (await next_of(arrivals)).prompt_logprobs
                assert got == [*told] * 20


async def test_noise_harms_nobody() -> None:
    """Bytes that are not a message are skipped; the next message is read."""
    async with both_ends() as (receiver, sender):
        with receiver.inbox.arrivals("a") as arrivals:
            sender._socket(receiver.inbox.reply_to).send(b"\xc1noise")
            sender.send(receiver.inbox.reply_to, [EngineOutput("a", (7,))])
            assert (await next_of(arrivals)).token_ids == (7,)


def test_an_ingress_that_takes_nothing_costs_a_bounded_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """If nobody listens at an address, the next messages after a bound are refused at once."""
    monkeypatch.setattr(token_channel, "MAX_WAITING_MESSAGES", 8)
    key, _ = zmq.curve_keypair()
    sender = TokenSender()
    try:
        nobody = ReplyTo("tcp://127.0.0.1:1", key.decode())
        taken = [sender.send(nobody, [EngineOutput("a", (step,))]) for step in range(50)]
        assert taken.count(True) == taken.index(False) <= 8
    finally:
        sender._context.destroy(linger=0)


@pytest.mark.parametrize("reply_to", [ReplyTo("nowhere", "x"), ReplyTo("tcp://127.0.0.1:1", "short")])
def test_an_address_that_is_none_is_refused(reply_to: ReplyTo) -> None:
    sender = TokenSender()
    assert not sender.send(
        reply_to,
        [
            EngineOutput(
                "a",
            )
        ],
    )
    sender.close()


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


async def test_an_output_that_cannot_be_written_ends_one_call_and_those_beside_it_go_on() -> None:
    """No engine may tell such a token, and none of another request is lost by it."""
    calls, sender, cancelled = opened()
    running = {name: begin(calls, name, INGRESSES[0], TokenStream()) for name in "abc"}

    class Writing(Sender):
        def send(self, to: ReplyTo, chunks: Sequence[EngineOutput]) -> bool:
            to_wire(list(chunks))
            return sender.send(to, chunks)

    calls._sender = Writing()  # type: ignore[assignment]
    calls.deliver([EngineOutput("a", (1,)), EngineOutput("b", (1 << 64,)), EngineOutput("c", (3,))])
    assert [chunk.token_ids for _, chunks in sender.messages for chunk in chunks] == [(1,), (3,)]
    assert (running["b"].end.result().error, cancelled) == ("unavailable", ["b"])
    calls.deliver([EngineOutput(name, (4,), finish_reason="length") for name in "ac"])
    assert [running[name].end.result().error for name in "ac"] == ["", ""]


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
        while asked.count("a") < before + 2:
            await let_others_run()

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
    while cancelled.count("here") < 3:
        await let_others_run()
    calls.forget("here")
    cancelled.clear()
    opens("coming")
    while cancelled.count("coming") < 2:
        await let_others_run()
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
    await let_others_run()
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
        monkeypatch.setattr("serve_app.engine.token_channel.time.monotonic", lambda: now_s)
        stream, left = TokenStream(interval_s), []
        for token in range(10):
            ready = stream.push(EngineOutput("r", (token,), finish_reason="length" if token == 9 else None))
            if ready is not None:
                left.append(list(ready.token_ids))
            now_s += 0.03
        return left

    assert leaving(0.0) == [[token] for token in range(10)]
    assert leaving(0.1) == [[0], [1, 2, 3, 4], [5, 6, 7, 8], [9]]
