"""What attackers send is as large as it may be, and what they read is read as it was sent."""

from __future__ import annotations

import asyncio
import json

import pytest

from benchmarks.isolation.hostile.attacks import LONG_PROMPT
from benchmarks.isolation.hostile.bodies import KINDS, MAX_BODY_BYTES, short_prompts
from benchmarks.isolation.hostile.raw_http import COMPLETIONS, Connection, Target, post, read_answer


@pytest.mark.parametrize("kind", KINDS)
def test_a_body_is_as_large_as_may_be(kind: str) -> None:
    """And valid JSON, but for brackets that no reader follows so deep."""
    path, make = KINDS[kind]
    body = make(3)
    assert MAX_BODY_BYTES - 64 < len(body) <= MAX_BODY_BYTES
    if kind == "nested":
        assert body.count(b"[") == body.count(b"]") > 4_000_000
        return
    read = json.loads(body)
    assert read["model"] == "demo"
    if kind in ("tiny_messages", "empty_system_messages"):
        assert len(read["messages"]) > 270_000
    elif kind == "token_ids":
        assert len(read["prompt"]) > 4_000_000
    else:
        assert len(read["messages"]) == 1
        assert make(4) != body
    assert path == (COMPLETIONS if "prompt" in read else "/v1/chat/completions")


def test_short_prompts_differ_by_number_and_may_refer() -> None:
    one, other = (json.loads(short_prompts(128, 16, number, LONG_PROMPT)) for number in (1, 2))
    assert len(one["prompt"]) == len(set(one["prompt"])) == 128
    assert not set(one["prompt"]) & set(other["prompt"])
    assert one["prompt_ref"] == LONG_PROMPT
    assert "prompt_ref" not in json.loads(short_prompts(2, 16, 1))


async def read(raw: bytes) -> tuple[int, dict[str, str], bytes]:
    reader = asyncio.StreamReader()
    reader.feed_data(raw)
    reader.feed_eof()
    return await read_answer(reader)


def test_answers_are_read_whole_and_in_chunks() -> None:
    plain = b"HTTP/1.1 429 Too Many\r\nRetry-After: 7\r\nContent-Length: 5\r\n\r\nhello"
    assert asyncio.run(read(plain)) == (429, {"retry-after": "7", "content-length": "5"}, b"hello")
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    assert asyncio.run(read(chunked))[2] == b"abcde"


def test_a_connection_is_used_again_and_opened_again_after_a_loss() -> None:
    """Tokens of an answer are counted, a lost connection has status 0, and the next request opens another."""
    answer = b'{"usage":{"prompt_tokens":3,"completion_tokens":16}}'
    opened = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        for _ in range(2):
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"Bearer key" in head
            await reader.readexactly(4)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(answer), answer))
        writer.close()

    async def ask() -> list[tuple[int, int]]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            host, port = server.sockets[0].getsockname()
            target = Target(host, port, "key", "127.0.0.1")
            connection = Connection(target)
            replies = [await connection.exchange(post(target, COMPLETIONS, b"body"), 30) for _ in range(4)]
            connection.abort()
        return [(reply.status, reply.completion_tokens) for reply in replies]

    assert asyncio.run(ask()) == [(200, 16), (200, 16), (0, 0), (200, 16)]
    assert opened == 2
