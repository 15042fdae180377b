"""What a worker sends over HTTP, read with distrust: no redirects, cookies or compression, and never more than fits.

A worker may lie, flood, stall or send text that is not for tenants. Bodies are read up to a bound that follows from
what was asked, and joined once. Large ones are decoded beside the loop. Knows no server's form.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

import aiohttp
import msgspec

T = TypeVar("T")

FACTS_BYTES = 8 << 20
"""Most of one answer about the server itself: vLLM's /openapi.json has a tenth of it, and so have its metrics."""
ERROR_BYTES = 64 << 10
EVENT_BYTES = 256 << 10
"""Of an event besides its tokens, and of all that tells no token, such as comments that keep a connection open."""
LARGE_BYTES = 64 << 10
"""Larger bodies are decoded in a thread."""
MAX_SHOWN_CHARS = 300

PROBE_TIMEOUT = aiohttp.ClientTimeout(total=10.0)

_UNPRINTABLE = re.compile(r"[^\x20-\x7e\xa0-\U0010ffff]+")


class Untrue(Exception):
    """A worker sent what cannot be: it ends the request that it answers, and no other. The message is for operators."""


LIES = (Untrue, msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What reading a worker's words may raise."""


def printable(text: str, most: int = MAX_SHOWN_CHARS) -> str:
    """Return a worker's text in one line of printable characters, cut off."""
    line = _UNPRINTABLE.sub(" ", text[: 4 * most]).strip()
    return line if len(line) <= most else f"{line[: most - 3]}..."


class WorkerHttp:
    """One worker's or several workers' HTTP, from one loop."""

    def __init__(self, key: str = "") -> None:
        """``key``: the servers' API key, "" for none."""
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._session = aiohttp.ClientSession(
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),  # a server's cookies would be sent with every tenant's requests
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0),
        )

    def ask(
        self, url: str, body: bytes | None = None, within: aiohttp.ClientTimeout | None = None
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Return an answer, still to be read: to a GET, or with a JSON ``body`` to a POST.

        A redirect is an answer like any other: prompts and keys go nowhere else.
        """
        return self._session.request(
            "GET" if body is None else "POST",
            url,
            data=body,
            headers={} if body is None else {"Content-Type": "application/json"},
            allow_redirects=False,
            timeout=within or self._session.timeout,
        )

    async def whole(
        self,
        url: str,
        body: bytes | None = None,
        *,
        most: int = FACTS_BYTES,
        within: aiohttp.ClientTimeout = PROBE_TIMEOUT,
    ) -> tuple[int, bytes]:
        """Return an answer's status and body. Raises Untrue, and errors of the connection."""
        async with self.ask(url, body, within) as answer:
            return answer.status, await read(answer, most)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._session.close()


async def read(answer: aiohttp.ClientResponse, most: int) -> bytes:
    """Return a body of at most ``most`` bytes. Raises Untrue for a larger or compressed one."""
    check_plain(answer)
    body = bytearray()
    async for piece in answer.content.iter_any():
        if len(body) + len(piece) > most:
            raise Untrue(f"it sends more than {most:,} bytes")
        body += piece
    return bytes(body)


def check_plain(answer: aiohttp.ClientResponse) -> None:
    """Raise Untrue for a body that nobody asked to be compressed: some bytes may stand for gigabytes."""
    if answer.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise Untrue("it compresses its answer, which was not asked for")


async def decoded(decode: Callable[[bytes], T], body: bytes) -> T:
    """Decode a body. Raises one of ``LIES``."""
    return decode(body) if len(body) <= LARGE_BYTES else await asyncio.to_thread(decode, body)


class Events:
    """The data of an answer's server-sent events, but the last, [DONE].

    ``most``: bytes that may come between two calls of ``advanced``, which says that an event brought something new.
    """

    def __init__(self, answer: aiohttp.ClientResponse, most: int) -> None:
        self._content = answer.content
        self._most = most
        self._idle_bytes = 0

    def advanced(self, most: int) -> None:
        """Count from zero again, up to ``most``: the last event brought the answer forward."""
        self._idle_bytes, self._most = 0, most

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the events. Raises Untrue for too many bytes that tell nothing."""
        rest = bytearray()
        async for data in self._content.iter_any():
            self._idle_bytes += len(data)
            if self._idle_bytes > self._most:
                raise Untrue(f"it sends {self._most:,} bytes that tell nothing")
            lines: Sequence[bytes] = data.split(b"\n")
            if len(lines) == 1:
                rest += data
                continue
            if rest:
                lines = (bytes(rest + lines[0]), *lines[1:])
            rest = bytearray(lines[-1])
            for line in lines[:-1]:
                if line.startswith(b"data:") and (event := line[5:].strip()) != b"[DONE]":
                    yield event
