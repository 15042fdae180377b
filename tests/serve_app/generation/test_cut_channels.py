"""The channel between replica and ingress is cut at random moments: tokens are lost, and answers stay the same."""

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from msgspec import structs
from ray.exceptions import ActorUnavailableError

from serve_app.engine.protocol import EngineOutput, to_wire
from serve_app.engine.token_channel import TokenReceiver, TokenSender
from serve_app.generation import dispatch
from serve_app.generation import dispatch as generation_call
from tests.serve_app.generation.fake_replicas import FakeHandle, FakeResult, answer, generation, ids, whole
from tests.serve_app.generation.outputs import output

pytestmark = pytest.mark.anyio

CUTS = 20
AT_ONCE = 8
TOKENS = 60


class Cable:
    """A connection to a local socket, until it is cut; reconnecting makes a new one."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._links: set[asyncio.Future[Any]] = set()
        self.cuts = 0

    async def open(self) -> int:
        self._server = await asyncio.start_server(self._link, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def _link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._port)

        async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            while data := await source.read(1 << 16):
                target.write(data)
            target.close()

        task = asyncio.ensure_future(asyncio.wait([
            asyncio.ensure_future(pump(reader, there_writer)), asyncio.ensure_future(pump(there_reader, writer)),
        ]))  # fmt: skip
        self._links.add(task)
        with suppress(asyncio.CancelledError):
            await task
        self._links.discard(task)
        writer.transport.abort()
        there_writer.transport.abort()

    def cut(self, which: int) -> None:
        """Cut one of the existing cables."""
        if self._links:
            self.cuts += 1
            sorted(self._links, key=id)[which % len(self._links)].cancel()

    def close(self) -> None:
        self._server.close()
        for link in self._links:
            link.cancel()


class ByCable(FakeResult):
    """A replica's call with chunks over a real channel, one per replica."""

    senders: defaultdict[str, TokenSender]

    async def get_async(self) -> bytes:
        sent = 0
        async for chunk in self._chunks:
            if not self.senders[self._replica].send(
                self._inbox.reply_to, [structs.replace(chunk, request_id=self._call_id, seq=sent)]
            ):
                return to_wire(output(seq=sent, error="unavailable"))
            sent += 1
            if chunk.finish_reason is not None:
                return to_wire(output(seq=sent, finish_reason=chunk.finish_reason))
            await asyncio.sleep(0.001)
        raise ActorUnavailableError("it broke off", None)


@asynccontextmanager
async def cabled(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[FakeHandle, Cable]]:
    receiver, senders = TokenReceiver("127.0.0.1"), defaultdict[str, TokenSender](TokenSender)
    port = int(receiver.inbox.reply_to.address.rpartition(":")[2])
    cable = Cable(port)
    handle = FakeHandle(answer)
    receiver.inbox.reply_to = structs.replace(receiver.inbox.reply_to, address=f"tcp://127.0.0.1:{await cable.open()}")
    handle.inbox = handle.dispatcher.inbox = receiver.inbox
    monkeypatch.setattr("tests.serve_app.generation.fake_replicas.FakeResult", ByCable)
    monkeypatch.setattr(ByCable, "senders", senders, raising=False)
    # A call given up too early costs an attempt, but no answer, so the speed of this machine changes nothing.
    monkeypatch.setattr(generation_call, "LATE_S", 0.1)
    monkeypatch.setattr(dispatch, "AT_ONCE_S", 0.0)
    monkeypatch.setattr(dispatch, "MOST_LOSSES", 10**6)
    try:
        yield handle, cable
    finally:
        cable.close()
        for sender in senders.values():
            await asyncio.to_thread(sender.close)
        receiver.close()


async def test_a_cut_channel_loses_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """While answers arrive, each is whole, its tokens are in order, and lost ones are requested again."""
    rng = random.Random(5)
    async with asyncio.timeout(120), cabled(monkeypatch) as (handle, cable):
        answers = 0

        def proven() -> bool:
            return cable.cuts >= CUTS and True in handle.after_first_token and answers > AT_ONCE

        async def one(number: int) -> None:
            nonlocal answers
            while not proven():
                got: list[EngineOutput] = []

                def take(tokens: EngineOutput, got: list[EngineOutput] = got) -> bool:
                    got.append(tokens)
                    return True

                asked = structs.replace(generation(TOKENS), request_id=f"r{number}-{answers}")
                async for tokens in handle.dispatcher.generate(asked, at_once=take):
                    take(tokens)
                assert ids(got) == whole(TOKENS)
                assert got[-1].finish_reason == "length"
                answers += 1

        async def cuts() -> None:
            while not proven():
                await asyncio.sleep(rng.uniform(0.1, 0.3))
                cable.cut(rng.randrange(100))

        await asyncio.gather(cuts(), *map(one, range(AT_ONCE)))
