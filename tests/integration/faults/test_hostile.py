"""Any bad request or stuck connection gets a 4xx with a sentence or is closed; others are undisturbed."""

import asyncio
import socket
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest

from tests.integration.conftest import HTTP, clients
from tests.integration.faults.raw_http import KINDS, make_case, run_cases

pytestmark = [pytest.mark.integration, pytest.mark.long]

CHAT = "/v1/chat/completions"
GOOD = {"model": "demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "seed": 5}
HALF_OPEN = 10_000
ATTACKER = "127.0.0.2"
CASES = range(120)


def test_rays_headers_are_not_for_clients(url: str) -> None:
    """Such headers are neither obeyed nor an error; a client's own request id is returned."""
    headers = [(b"x-request-timeout-seconds", b"0.000001"), (b"x-request-id", b"mine-1"), (b"x-session-id", b"\xff")]
    answer = HTTP.post(url + CHAT, json=GOOD, headers=headers)
    assert (answer.status_code, answer.headers["x-request-id"]) == (200, "mine-1")


def test_half_open_connections_of_one_address_keep_nobody_out(url: str) -> None:
    """Ten thousand connections hold half a request, while all other requests are answered.

    docs: isolation
    """
    parts = urlsplit(url)

    async def open_half() -> socket.socket | None:
        half = socket.socket()
        half.bind((ATTACKER, 0))
        half.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(half, (parts.hostname, parts.port))
            await asyncio.get_running_loop().sock_sendall(half, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
        except OSError:
            half.close()
            return None
        return half

    async def run() -> list[int]:
        statuses: list[int] = []
        with ExitStack() as ending:
            async with clients(url) as client:
                for _ in range(HALF_OPEN // 500):
                    for half in filter(None, await asyncio.gather(*(open_half() for _ in range(500)))):
                        ending.callback(half.close)
                    # Each uses its own connection.
                    answers = [client.post(CHAT, json=GOOD, headers={"connection": "close"}) for _ in range(5)]
                    statuses += [answer.status_code for answer in await asyncio.gather(*answers)]
        return statuses

    assert set(asyncio.run(run())) == {200}


def test_broken_requests_get_a_4xx_or_an_end_and_a_neighbour_its_answers(url: str) -> None:
    """No case gets a 5xx or hangs, and other clients get the same answer as before. (docs: isolation)"""
    assert {make_case(seed)[0] for seed in CASES} == set(KINDS)

    async def run() -> tuple[dict[str, int], list[object], set[str]]:
        seen = set()
        async with clients(url) as client:
            broken = asyncio.create_task(run_cases(url, CASES))
            while not broken.done():
                answer = await client.post(CHAT, json=GOOD)
                seen.add(answer.raise_for_status().json()["choices"][0]["message"]["content"])
        return *(await broken), seen

    statuses, wrong, seen = asyncio.run(run())
    assert (wrong, len(seen)) == ([], 1)
    assert statuses["400"] > len(CASES) // 4
