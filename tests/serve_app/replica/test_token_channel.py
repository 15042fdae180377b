"""The channel sends tokens in order, each to its call, encrypted, and never blocks a replica."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq
from msgspec import structs

from serve_app.engine.protocol import EngineOutput, FirstToken, ReplyTo, TokenLogprob, to_wire
from serve_app.replica import token_channel
from serve_app.replica.token_channel import Arrivals, TokenReceiver, TokenSender, TokenStream
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
