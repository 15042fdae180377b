"""HTTP/1.1 over plain asyncio streams, for attackers: ready bytes go out, and little is read of what comes back.

A client of httpx' kind would take the processor that the server and the watched tenant's clock need.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

_COMPLETION_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')
_FAILURES = (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError)


@dataclass(frozen=True, slots=True)
class Target:
    """Where an attack goes, and as whom. ``source``: the address it comes from, another than the watched tenant's."""

    host: str
    port: int
    api_key: str
    source: str = "127.0.0.2"

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a new connection. Raises OSError."""
        return await asyncio.open_connection(self.host, self.port, local_addr=(self.source, 0))


@dataclass(frozen=True, slots=True)
class Reply:
    """What became of one request. ``ended_s``: by time.monotonic; ``status`` 0: the connection was lost."""

    ended_s: float
    took_s: float
    status: int
    completion_tokens: int = 0
    retry_after_s: float = 0.0


def post(target: Target, path: str, body: bytes) -> bytes:
    """Return a request as it goes over the wire."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {target.host}:{target.port}\r\nAuthorization: Bearer {target.api_key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def post_json(target: Target, path: str, body: Mapping[str, Any]) -> bytes:
    """Return a request with a JSON body as it goes over the wire."""
    return post(target, path, json.dumps(body).encode())


class Connection:
    """One connection that is opened when it is needed, and again when it was lost."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def exchange(self, request: bytes, timeout_s: float) -> Reply:
        """Send one request and read its answer to the end."""
        started_s = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                if self._streams is None:
                    self._streams = await self._target.connect()
                reader, writer = self._streams
                # Not drained: whoever refuses a body may do so before its end.
                writer.write(request)
                status, headers, body = await read_answer(reader)
        except (*_FAILURES, TimeoutError):
            self.abort()
            return Reply(ended_s := time.monotonic(), ended_s - started_s, 0)
        except asyncio.CancelledError:
            self.abort()
            raise
        if headers.get("connection") == "close":
            self.abort()
        found = _COMPLETION_TOKENS.search(body) if status == 200 else None
        retry_after = headers.get("retry-after", "")
        return Reply(
            ended_s := time.monotonic(),
            ended_s - started_s,
            status,
            int(found.group(1)) if found else 0,
            float(retry_after) if retry_after.isdecimal() else 0.0,
        )

    def abort(self) -> None:
        """Leave without a word."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers (lower case) and body. Raises ValueError or an error of the stream."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.strip().split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        parts = []
        while size := int(await reader.readuntil(b"\r\n"), 16):
            parts.append(await reader.readexactly(size))
            await reader.readexactly(2)
        await reader.readexactly(2)
        body = b"".join(parts)
    else:
        body = await reader.readexactly(int(headers.get("content-length", "0")))
    return int(first.split(" ")[1]), headers, body
