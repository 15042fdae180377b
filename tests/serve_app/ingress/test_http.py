"""Bodies are bounded, disconnects end work, errors carry Retry-After."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from serve_app.errors import InvalidRequest, RateLimited, RequestTooLarge
from serve_app.ingress.http import error_headers, read_body, until_disconnect


def request(messages: list[dict[str, Any]], headers: dict[str, str] | None = None) -> tuple[Request, list[Any]]:
    """A request whose receive channel holds ``messages`` and then waits for ever; also what was taken from it."""
    taken: list[Any] = []

    async def receive() -> dict[str, Any]:
        if messages:
            taken.append(messages.pop(0))
            return taken[-1]
        await asyncio.Event().wait()
        raise AssertionError

    raw = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": raw}, receive), taken


def part(body: bytes, more: bool) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def test_a_body_in_parts_is_joined() -> None:
    """A chunked body up to the bound comes through whole."""
    made, _ = request([part(b"abc", True), part(b"de", False)])
    assert asyncio.run(read_body(made, 5)) == b"abcde"


def test_a_body_over_the_bound_is_refused_before_it_is_read() -> None:
    """An announced length over the bound reads nothing; an unannounced one stops at the bound."""
    announced, taken = request([part(b"x", False)], {"content-length": "6"})
    with pytest.raises(RequestTooLarge):
        asyncio.run(read_body(announced, 5))
    assert taken == []
    flood, taken = request([part(b"xxxx", True) for _ in range(100)])
    with pytest.raises(RequestTooLarge):
        asyncio.run(read_body(flood, 5))
    assert len(taken) == 2


def test_a_compressed_body_is_refused() -> None:
    """A body we would have to inflate could be of any size."""
    made, _ = request([part(b"x", False)], {"content-encoding": "gzip"})
    with pytest.raises(InvalidRequest, match="gzip"):
        asyncio.run(read_body(made, 5))


def test_work_ends_when_the_client_leaves() -> None:
    """The disconnect cancels the work, which sees CancelledError."""
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    made, _ = request([{"type": "http.disconnect"}])
    with pytest.raises(ClientDisconnect):
        asyncio.run(until_disconnect(made, work()))
    assert ended == ["cancelled"]


def test_finished_work_is_returned_and_errors_are_raised() -> None:
    """Without a disconnect the result or the error of the work comes through."""

    async def good() -> int:
        return 3

    async def bad() -> int:
        raise RateLimited("later", retry_after_s=0.2)

    assert asyncio.run(until_disconnect(request([])[0], good())) == 3
    with pytest.raises(RateLimited) as caught:
        asyncio.run(until_disconnect(request([])[0], bad()))
    assert error_headers(caught.value) == {"retry-after": "1"}
