"""The port of a running instance: what one client holds of it is bounded, and Ray's headers are not for clients."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack
from urllib.parse import urlsplit

import httpx
import pytest

from tests.integration.conftest import PATIENCE_S

pytestmark = pytest.mark.integration

CHAT = "/v1/chat/completions"
GOOD = {"model": "demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}
HALF_OPEN = 10_000
ATTACKER = "127.0.0.2"


def test_half_open_connections_of_one_address_keep_nobody_out(url: str) -> None:
    """Ten thousand connections with half a request: everybody else's requests are answered meanwhile."""
    parts = urlsplit(url)

    async def open_half() -> socket.socket | None:
        half = socket.socket()
        try:
            half.bind((ATTACKER, 0))
            half.setblocking(False)
            await asyncio.get_running_loop().sock_connect(half, (parts.hostname, parts.port))
            await asyncio.get_running_loop().sock_sendall(half, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
        except OSError:
            half.close()
            return None
        return half

    async def run() -> list[int]:
        statuses: list[int] = []
        with ExitStack() as ending:
            async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
                for _ in range(HALF_OPEN // 500):
                    opened = await asyncio.gather(*(open_half() for _ in range(500)))
                    for half in filter(None, opened):
                        ending.callback(half.close)
                    # Each on a connection of its own.
                    answers = [client.post(CHAT, json=GOOD, headers={"connection": "close"}) for _ in range(5)]
                    statuses += [answer.status_code for answer in await asyncio.gather(*answers)]
        return statuses

    statuses = asyncio.run(run())
    assert statuses == [200] * len(statuses)


@pytest.mark.parametrize(
    "header",
    [
        ("x-request-id", b"\xff\xfe"),
        ("x-request-timeout-seconds", b"\xff"),
        ("x-request-timeout-seconds", b"0.000001"),
        ("x-request-disconnect-disabled", b"\xff"),
        ("x-session-id", b"\xff"),
        ("serve_multiplexed_model_id", b"\xff"),
    ],
)
def test_rays_headers_are_not_for_clients(url: str, header: tuple[str, bytes]) -> None:
    """Neither obeyed nor a fault: the request is answered as it would be without them."""
    answer = httpx.post(url + CHAT, json=GOOD, headers=[(header[0].encode(), header[1])], timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-request-id"].isascii()


def test_a_request_id_comes_back(url: str) -> None:
    """A client finds its own id in the answer."""
    answer = httpx.post(url + CHAT, json=GOOD, headers={"x-request-id": "mine-1"}, timeout=PATIENCE_S)
    assert answer.headers["x-request-id"] == "mine-1"
