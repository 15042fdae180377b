"""What a client saw is judged right: a benchmark that takes a broken answer for a whole one shows nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.harness.failures.clients import Clients

BODY = {"prompt": "p", "seed": 1}


def event(text: str, finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish_reason}
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


@asynccontextmanager
async def serving(*answers: list[bytes]) -> AsyncIterator[str]:
    """Answer one request after the other with these pieces, then close the connection; none at all: close at once."""
    left = list(answers)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        pieces = left.pop(0)
        if pieces:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for piece in pieces:
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            await writer.drain()
        if pieces and b"[DONE]" in pieces[-1]:
            writer.write(b"0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    ("pieces", "outcome"),
    [
        ([event("a"), event("b", "length"), b"data: [DONE]\n\n"], "whole"),
        ([event("a"), event("c", "length"), b"data: [DONE]\n\n"], "altered"),
        ([event("a")], "cut short"),
        ([event("a"), b'data: {"error": {"code": "replicas_lost"}}\n\n'], "cut short"),
        ([], "lost"),
    ],
)
def test_an_answer_is_whole_altered_cut_short_or_lost(pieces: list[bytes], outcome: str) -> None:
    async def run() -> dict[str, int]:
        undisturbed = [event("a"), event("b", "length"), b"data: [DONE]\n\n"]
        async with serving(undisturbed, pieces) as url:
            clients = Clients(url)
            await clients.undisturbed([BODY])
            return clients.outcomes(await clients.at_once([BODY]))

    expected = dict.fromkeys(("whole", "lost", "cut short", "altered"), 0)
    assert asyncio.run(run()) == {**expected, outcome: 1}
