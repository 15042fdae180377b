"""Broken HTTP requests. A seed determines a case: its kind, its bytes, and the pause between its parts."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

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
KINDS = ("truncated", "pipelined", "slow", "flipped", "noise", "lengths", "headers", "first lines", "bodies", "chunked")


def make_case(seed: int) -> tuple[str, list[bytes], float]:
    """Return the case of a seed: a valid request with one defect."""
    rng = random.Random(seed)
    kind, path, text = rng.choice(KINDS), rng.choice(PATHS), rng.choice(("Hi", "ä" * 40, "word " * 200))
    fields: dict[str, Any] = {"model": "demo", "max_tokens": 1}
    fields |= {"messages": [{"role": "user", "content": text}]} if path != PATHS[1] else {"prompt": text}
    body = json.dumps(fields).encode()
    lines = [b"POST %b HTTP/1.1" % path.encode(), b"Host: localhost", b"Content-Type: application/json"]
    length = b"Content-Length: %d" % len(body)
    match kind:
        case "lengths":
            lines += [b"Content-Length: " + rng.choice(LENGTHS), *([length] if rng.random() < 0.3 else [])]
        case "headers":
            lines += [rng.choice(HEADERS), length]
        case "first lines":
            lines = [rng.choice(FIRST_LINES), *lines[1:], length]
        case "bodies":
            wide = (body.decode().encode(coding) for coding in ("utf-16", "utf-32"))
            body = rng.choice((*BODIES, *wide, body.replace(b"Hi", b"\xff\xfe\x00")))
            lines.append(b"Content-Length: %d" % len(body))
        case "chunked":
            half = len(body) // 2
            size = rng.choice((b"%x" % half, b"%X;name=value" % half, *SIZES))
            body = b"%b\r\n%b\r\n%x\r\n%b\r\n%b" % (size, body[:half], len(body) - half, body[half:], rng.choice(ENDS))
            lines += [*([length] if rng.random() < 0.2 else []), b"Transfer-Encoding: " + rng.choice(CODINGS)]
        case _:
            lines.append(length)
    return kind, *_sent(rng, kind, b"\r\n".join(lines) + b"\r\n\r\n" + body)


def _sent(rng: random.Random, kind: str, whole: bytes) -> tuple[list[bytes], float]:
    match kind:
        case "truncated":
            return [whole[: rng.randrange(len(whole))]], 0.0
        case "pipelined":
            return [(whole * rng.randint(2, 5))[: rng.choice((None, -7))]], 0.0
        case "slow":
            cuts = sorted(rng.sample(range(1, len(whole)), 8))
            parts = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
            return parts[: rng.randint(1, len(parts))], rng.choice((0.01, 0.1))
        case "flipped" | "noise":
            noise = bytearray(whole if kind == "flipped" else rng.randbytes(rng.choice((1, 30, 5000))))
            for _ in range(rng.randint(1, 8)):
                noise[rng.randrange(len(noise))] = rng.randrange(256)
            return [bytes(noise)], 0.0
    return [whole], 0.0


async def run_cases(url: str, seeds: Iterable[int], connections: int = 30) -> tuple[Counter[str], list[Any]]:
    """Send the cases of ``seeds``; return the number of answers by status, and the cases that hung or got a 5xx."""
    statuses: Counter[str] = Counter()
    wrong: list[Any] = []
    left = iter(seeds)

    async def sender() -> None:
        for seed in left:
            kind, parts, pause_s = make_case(seed)
            data = await _answer(url, parts, pause_s)
            lines = (data or b"").split(b"\r\n")
            answers = [line.split(b" ")[1].decode("latin-1") for line in lines if line.startswith(b"HTTP/1.")]
            statuses.update(answers or ["closed"])
            if data is None or any(status.startswith("5") for status in answers):
                wrong.append((seed, kind, (data or b"nothing came")[:200]))

    await asyncio.gather(*(sender() for _ in range(connections)))
    return statuses, wrong


async def _answer(url: str, parts: list[bytes], pause_s: float) -> bytes | None:
    """Send parts, then an EOF if no byte comes back; return the answer, or None if no answer and no close follows."""
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    data = b""
    try:
        for part in parts:
            writer.write(part)
            await asyncio.sleep(pause_s)
        try:
            data = await asyncio.wait_for(reader.read(1 << 16), FIRST_BYTE_S)
        except TimeoutError:
            writer.write_eof()
            data = await asyncio.wait_for(reader.read(1 << 16), HANG_S)
        while part := await asyncio.wait_for(reader.read(1 << 16), QUIET_S):
            data += part
    except TimeoutError:
        return data or None  # after an answer, the server only waits for another request
    except OSError:
        return b""  # the server closed the connection while we were sending
    finally:
        writer.transport.abort()
    return data
