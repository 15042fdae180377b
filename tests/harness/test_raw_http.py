"""The fuzz of raw HTTP tells what is wrong with a server that is."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from tests.harness import raw_http


def test_server_errors_and_hangs_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose every third connection is a 500, a third silence, and a third an answer."""
    monkeypatch.setattr(raw_http, "HANG_S", 0.3)
    monkeypatch.setattr(raw_http, "_FIRST_BYTE_S", 0.1)
    monkeypatch.setattr(raw_http, "_QUIET_S", 0.1)
    served = Counter[str]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        kind = ("500 Oh", "", "200 OK")[served.total() % 3]
        served[kind] += 1
        await reader.read(1 << 16)
        if kind:
            writer.write(f"HTTP/1.1 {kind}\r\nContent-Length: 0\r\n\r\n".encode())
        else:
            await asyncio.sleep(1.0)
        writer.close()

    async def run() -> raw_http.Findings:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            found = raw_http.Findings()
            for seed in range(6):
                await raw_http._send(url, seed, raw_http.Case("whole", (b"GET / HTTP/1.1\r\n\r\n",)), found)
            return found

    found = asyncio.run(run())
    assert [seed for seed, *_ in found.server_errors] == [0, 3]
    assert [seed for seed, *_ in found.hangs] == [1, 4]
    assert found.statuses == {"500": 2, "200": 2}
