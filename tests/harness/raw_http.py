"""Broken HTTP requests to a real instance: no 5xx, nobody waits for ever, and a neighbour notices nothing.

A case is a function of its seed; it is bytes and the pauses between them.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.harness.plain_http import NO_CERTIFICATES

HANG_S = 90.0
"""Longer than the server waits for the rest of a request."""
FIRST_BYTE_S, QUIET_S = 0.5, 0.5
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/models", "/v1/cache/explain")
LENGTHS = (b"-1", b"0", b"+5", b"0x10", b"1e3", b"", b"5, 5", b"\xb2", b"3", b"1" + b"0" * 8, b"1" + b"0" * 30)
HEADERS = (
    b"Content-Encoding: gzip", b"Content-Encoding: br, x", b"Content-Type: text/html; charset=utf-16", b"X: \xff\xfe",
    b"Authorization: Bearer \xff", b"Authorization: Basic", b"x-api-key: \xe4", b"Expect: 100-continue", b"Expect: 1",
    b"Upgrade: websocket\r\nConnection: Upgrade", b"X-Request-Id: " + b"\xf0" * 300, b"Connection: close, \x01",
    b"X-Large: " + b"a" * 9_000, b"X-Large: " + b"a" * 300_000, b"\r\n".join(b"X-%d: a" % n for n in range(1500)),
)  # fmt: skip
FIRST_LINES = (
    b"POST /v1/chat/completions HTTP/9.9", b"POST  HTTP/1.1", b"GET /v1/models/%ff%00%2e%2e HTTP/1.1",
    b"DELETE /v1/models/x HTTP/1.1", b"TRACE / HTTP/1.0", b"POST /v1/chat/completions", b"HEAD /health HTTP/1.1",
    b"GET /v1/cache/state?limit=-9999999999999999999999 HTTP/1.1", b"POST /" + b"a" * 70_000 + b" HTTP/1.1",
)  # fmt: skip
BODIES = (b"\x1f\x8b\x08", b"\x00" * 64, b"[" * 60_000, b'"\\ud800"', b"{}", b"")
CODINGS = (b"chunked", b"Chunked", b"gzip, chunked", b"identity", b"chunked, chunked")
SIZES = (b"ffffffffffffffff", b"-1", b"g", b"", b"0" * 5000 + b"1")
ENDS = (b"0\r\n\r\n", b"0\r\n", b"0\r\nX-Trailer: a\r\n\r\n", b"", b"0\r\n\r\n0\r\n\r\n")


@dataclass(frozen=True, slots=True)
class Case:
    """What one connection sends: parts with ``pause_s`` between them."""

    kind: str
    parts: tuple[bytes, ...]
    pause_s: float = 0.0


@dataclass(slots=True)
class Findings:
    """What came of the cases. ``server_errors``, ``hangs``: as (seed, kind, what came first)."""

    statuses: Counter[str] = field(default_factory=Counter)
    server_errors: list[tuple[int, str, str]] = field(default_factory=list)
    hangs: list[tuple[int, str, str]] = field(default_factory=list)
    neighbour: Counter[str] = field(default_factory=Counter)


def make_case(seed: int, model: str) -> Case:
    """Return the case of a seed: a request that is right, but for one thing."""
    rng = random.Random(seed)
    path = rng.choice(PATHS)
    text = rng.choice(("Hi", "ä" * 40, "word " * 200))
    fields: dict[str, Any] = {"model": model, "max_tokens": 1}
    fields |= {"messages": [{"role": "user", "content": text}]} if path != PATHS[1] else {"prompt": text}
    body = json.dumps(fields).encode()
    lines = [b"POST %b HTTP/1.1" % path.encode(), b"Host: localhost", b"Content-Type: application/json"]
    length = b"Content-Length: %d" % len(body)
    whole = _joined([*lines, length], body)
    kind = rng.choice(tuple(_KINDS))
    return _KINDS[kind](rng, kind, lines, length, body, whole)


def _joined(lines: list[bytes], body: bytes) -> bytes:
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def _bytes(rng: random.Random, kind: str, _: list[bytes], __: bytes, ___: bytes, whole: bytes) -> Case:
    if kind == "truncated":
        return Case(kind, (whole[: rng.randrange(len(whole))],))
    if kind == "pipelined":
        return Case(kind, ((whole * rng.randint(2, 5))[: rng.choice((None, -7))],))
    if kind == "slow":
        cuts = sorted(rng.sample(range(1, len(whole)), 8))
        parts = tuple(whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True))
        return Case(kind, parts[: rng.randint(1, len(parts))], rng.choice((0.01, 0.1)))
    noise = bytearray(whole if kind == "flipped" else rng.randbytes(rng.choice((1, 30, 5000))))
    for _number in range(rng.randint(1, 8)):
        noise[rng.randrange(len(noise))] = rng.randrange(256)
    return Case(kind, (bytes(noise),))


def _heads(rng: random.Random, kind: str, lines: list[bytes], length: bytes, body: bytes, _: bytes) -> Case:
    if kind == "lengths":
        lines = [*lines, b"Content-Length: " + rng.choice(LENGTHS), *([length] if rng.random() < 0.3 else [])]
    elif kind == "headers":
        lines = [*lines, rng.choice(HEADERS), length]
    elif kind == "first lines":
        lines = [rng.choice(FIRST_LINES), *lines[1:], length]
    elif kind == "bodies":
        text = body.decode()
        body = rng.choice((*BODIES, text.encode("utf-16"), text.encode("utf-32"), body.replace(b"Hi", b"\xff\xfe\x00")))
        lines = [*lines, b"Content-Length: %d" % len(body)]
    else:
        half = len(body) // 2
        size = rng.choice((b"%x" % half, b"%X;name=value" % half, *SIZES))
        body = b"%b\r\n%b\r\n%x\r\n%b\r\n%b" % (size, body[:half], len(body) - half, body[half:], rng.choice(ENDS))
        both = [length] if rng.random() < 0.2 else []
        lines = [*lines, *both, b"Transfer-Encoding: " + rng.choice(CODINGS)]
    return Case(kind, (_joined(lines, body),))


_KINDS: dict[str, Callable[[random.Random, str, list[bytes], bytes, bytes, bytes], Case]] = {
    **dict.fromkeys(("truncated", "pipelined", "slow", "flipped", "noise"), _bytes),
    **dict.fromkeys(("lengths", "headers", "first lines", "bodies", "chunked"), _heads),
}


async def run_cases(url: str, model: str, seeds: range, connections: int = 30) -> Findings:
    """Send the cases of ``seeds`` while a neighbour asks the same question again and again, beside and after them."""
    found = Findings()
    left = iter(seeds)
    over = asyncio.Event()

    async def sender() -> None:
        for seed in left:
            await _send(url, seed, make_case(seed, model), found)

    neighbour = asyncio.create_task(_neighbour(url, model, over, found.neighbour))
    try:
        await asyncio.gather(*(sender() for _ in range(connections)))
    finally:
        over.set()
        await neighbour
    return found


async def _send(url: str, seed: int, case: Case, found: Findings) -> None:
    """Send a case, and its end where nothing comes; whoever gets neither an answer nor an end then was left hanging."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    data = b""
    try:
        for part in case.parts:
            writer.write(part)
            await asyncio.sleep(case.pause_s)
        try:
            data = await asyncio.wait_for(reader.read(1 << 16), FIRST_BYTE_S)
        except TimeoutError:
            writer.write_eof()
            data = await asyncio.wait_for(reader.read(1 << 16), HANG_S)
        while part := await asyncio.wait_for(reader.read(1 << 16), QUIET_S):
            data += part
    except TimeoutError:
        if not data:
            found.hangs.append((seed, case.kind, ""))
            return  # else it waits for another request
    except OSError:
        data = b""  # it was closed on us while we still sent
    finally:
        writer.transport.abort()
    answers = [line.split(b" ")[1].decode("latin-1") for line in data.split(b"\r\n") if line.startswith(b"HTTP/1.")]
    found.statuses.update(answers or ["closed"])
    found.server_errors += [
        (seed, case.kind, data[:200].decode("latin-1")) for status in answers if status.startswith("5")
    ]


async def _neighbour(url: str, model: str, over: asyncio.Event, counts: Counter[str]) -> None:
    """Count what becomes of one question: "equal" answers, and all others."""
    body = {"model": model, "messages": [{"role": "user", "content": "How far?"}], "max_tokens": 4, "seed": 5}
    first = ""
    async with httpx.AsyncClient(base_url=url, timeout=HANG_S, verify=NO_CERTIFICATES) as client:
        while True:
            last = over.is_set()
            answer = await client.post(PATHS[0], json=body)
            text = answer.json()["choices"][0]["message"]["content"] if answer.status_code == 200 else ""
            first = first or text
            counts["equal" if answer.status_code == 200 and text == first else f"other {answer.status_code}"] += 1
            if last:
                return
