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

HANG_S = 90.0
"""Longer than the server waits for the rest of a request."""
_FIRST_BYTE_S = 0.5
_QUIET_S = 1.0
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/models", "/v1/cache/explain")


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
    """Return the case of a seed."""
    rng = random.Random(seed)
    return rng.choice(_KINDS)(rng, model)


def _good(rng: random.Random, model: str) -> tuple[list[bytes], bytes]:
    """Return the lines of a head, and a body, of a request that is right."""
    path = rng.choice(PATHS)
    text = rng.choice(("Hi", "ä" * 40, "word " * 200))
    body: dict[str, Any] = {"model": model, "max_tokens": 1}
    body |= {"messages": [{"role": "user", "content": text}]} if path != PATHS[1] else {"prompt": text}
    data = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1".encode(), b"Host: localhost", b"Content-Type: application/json"]
    return [*lines, b"Content-Length: %d" % len(data)], data


def _joined(lines: list[bytes], body: bytes) -> bytes:
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def _truncated(rng: random.Random, model: str) -> Case:
    whole = _joined(*_good(rng, model))
    return Case("truncated", (whole[: rng.randrange(len(whole))],))


def _flipped(rng: random.Random, model: str) -> Case:
    whole = bytearray(_joined(*_good(rng, model)))
    for _ in range(rng.randint(1, 8)):
        whole[rng.randrange(len(whole))] = rng.randrange(256)
    return Case("flipped", (bytes(whole),))


def _oversized(rng: random.Random, model: str) -> Case:
    lines, body = _good(rng, model)
    many = rng.choice((
        [b"X-Large: " + b"a" * rng.choice((9_000, 70_000, 300_000))],
        [b"X-%d: a" % number for number in range(rng.choice((120, 1500)))],
        [b"Content-Length: %d" % rng.choice((10**8, 10**12, 10**30))],
    ))  # fmt: skip
    if rng.random() < 0.2:
        lines[0] = b"POST /" + b"a" * rng.choice((9_000, 70_000)) + b" HTTP/1.1"
    return Case("oversized", (_joined([*lines[:-1], *many], body),))


def _lengths(rng: random.Random, model: str) -> Case:
    lines, body = _good(rng, model)
    length = rng.choice((b"-1", b"0", b"+5", b"0x10", b"1e3", b"", b"5, 5", b"\xb2", b"%d" % (len(body) + 9), b"3"))
    more = [lines[-1]] if rng.random() < 0.3 else []
    return Case("lengths", (_joined([*lines[:-1], b"Content-Length: " + length, *more], body),))


def _chunked(rng: random.Random, model: str) -> Case:
    lines, body = _good(rng, model)
    half = len(body) // 2
    sizes = (b"%x" % half, b"%X;name=value" % half, b"ffffffffffffffff", b"-1", b"g", b"", b"0" * 5000 + b"%x" % half)
    end = rng.choice((b"0\r\n\r\n", b"0\r\n", b"0\r\nX-Trailer: a\r\n\r\n", b"", b"0\r\n\r\n0\r\n\r\n"))
    data = b"%b\r\n%b\r\n%x\r\n%b\r\n%b" % (rng.choice(sizes), body[:half], len(body) - half, body[half:], end)
    coding = rng.choice((b"chunked", b"chunked", b"Chunked", b"gzip, chunked", b"identity", b"chunked, chunked"))
    both = [lines[-1]] if rng.random() < 0.2 else []
    return Case("chunked", (_joined([*lines[:-1], *both, b"Transfer-Encoding: " + coding], data),))


def _encodings(rng: random.Random, model: str) -> Case:
    lines, body = _good(rng, model)
    text = body.decode()
    body = rng.choice((
        text.encode("utf-16"), text.encode("utf-32"), b"\xef\xbb\xbf" + body, body.replace(b"Hi", b"\xff\xfe\x00"),
        b"\x1f\x8b\x08" + body, b"\x00" * 64, b"[" * rng.choice((100, 60_000)), b'"\\ud800"', b"{}", b"",
    ))  # fmt: skip
    more = rng.choice(
        (
            b"Content-Encoding: gzip",
            b"Content-Encoding: br, x",
            b"Content-Type: text/html; charset=utf-16",
            b"X: \xff\xfe",
            b"Authorization: Bearer \xff",
            b"Authorization: Basic",
            b"x-api-key: \xe4",
            b"Expect: 100-continue",
            b"Expect: 1",
            b"Upgrade: websocket\r\nConnection: Upgrade",
            b"X-Request-Id: " + b"\xf0" * 300,
            b"Connection: close, \x01",
        )
    )
    return Case("encodings", (_joined([*lines[:-1], more, b"Content-Length: %d" % len(body)], body),))


def _first_lines(rng: random.Random, model: str) -> Case:
    lines, body = _good(rng, model)
    lines[0] = rng.choice(
        (
            b"POST /v1/chat/completions HTTP/9.9",
            b"POST  HTTP/1.1",
            b"GET /v1/models/%ff%00%2e%2e HTTP/1.1",
            b"BREW / HTTP/1.1",
            b"POST http://[::1/ HTTP/1.1",
            b"PRI * HTTP/2.0",
            b"OPTIONS * HTTP/1.1",
            b"CONNECT a:1 HTTP/1.1",
            b"\x16\x03\x01\x02",
            b"GET /v1/usage?day=%00&x=" + b"a" * 3000 + b" HTTP/1.1",
            b"DELETE /v1/models/x HTTP/1.1",
            b"TRACE / HTTP/1.0",
            b"POST /v1/chat/completions",
            b"GET /v1/cache/state?limit=-9999999999999999999999 HTTP/1.1",
            b"HEAD /health HTTP/1.1",
        )
    )
    return Case("first lines", (_joined(lines, body),))


def _slow(rng: random.Random, model: str) -> Case:
    whole = _joined(*_good(rng, model))
    cuts = sorted(rng.sample(range(1, len(whole)), min(8, len(whole) - 1)))
    parts = tuple(whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True))
    return Case("slow", parts[: rng.randint(1, len(parts))], pause_s=rng.choice((0.01, 0.1)))


def _pipelined(rng: random.Random, model: str) -> Case:
    parts = [_joined(*_good(rng, model)) for _ in range(rng.randint(2, 5))]
    return Case("pipelined", (b"".join(parts)[: rng.choice((None, -7))],))


def _noise(rng: random.Random, _: str) -> Case:
    return Case("noise", (rng.randbytes(rng.choice((1, 30, 5000))) + rng.choice((b"", b"\r\n\r\n")),))


_KINDS: tuple[Callable[[random.Random, str], Case], ...] = (
    _truncated, _flipped, _oversized, _lengths, _chunked, _encodings, _first_lines, _slow, _pipelined, _noise,
)  # fmt: skip


async def run_cases(url: str, model: str, seeds: range, connections: int = 16) -> Findings:
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
    try:
        for part in case.parts:
            writer.write(part)
            await asyncio.sleep(case.pause_s)
        data = b""
        try:
            data = await asyncio.wait_for(reader.read(1 << 16), _FIRST_BYTE_S)
        except TimeoutError:
            writer.write_eof()
            data = await asyncio.wait_for(reader.read(1 << 16), HANG_S)
        try:
            while part := await asyncio.wait_for(reader.read(1 << 16), _QUIET_S):
                data += part
        except TimeoutError:
            pass  # it waits for another request
    except TimeoutError:
        found.hangs.append((seed, case.kind, ""))
        return
    except OSError:
        data = b""  # it was closed on us while we still sent
    finally:
        writer.transport.abort()
    answers = [line.split(b" ")[1].decode("latin-1") for line in data.split(b"\r\n") if line.startswith(b"HTTP/1.")]
    found.statuses.update(answers or ["closed"])
    found.server_errors += [(seed, case.kind, data[:200].decode("latin-1")) for one in answers if one.startswith("5")]


async def _neighbour(url: str, model: str, over: asyncio.Event, counts: Counter[str]) -> None:
    """Count what becomes of one question: "equal" answers, and all others."""
    body = {"model": model, "messages": [{"role": "user", "content": "How far?"}], "max_tokens": 4, "temperature": 0}
    first = ""
    async with httpx.AsyncClient(base_url=url, timeout=HANG_S) as client:
        while True:
            last = over.is_set()
            answer = await client.post(PATHS[0], json=body)
            text = answer.json()["choices"][0]["message"]["content"] if answer.status_code == 200 else ""
            first = first or text
            counts["equal" if answer.status_code == 200 and text == first else f"other {answer.status_code}"] += 1
            if last:
                return
