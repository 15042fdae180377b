"""Bodies are bounded, disconnects end work, errors carry Retry-After."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response

from serve_app.errors import InvalidRequest, RateLimited, RequestTimeout, RequestTooLarge
from serve_app.ingress.http import error_headers, read_body, until_disconnect
from tests.serve_app.ingress.scripted import PATIENCE_S, server


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
    """The disconnect cancels the block, which sees CancelledError; its task is then as if it had not been cancelled."""
    ended: list[str] = []

    async def work() -> None:
        made, _ = request([{"type": "http.disconnect"}])
        with pytest.raises(ClientDisconnect):
            async with until_disconnect(made):
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    ended.append("cancelled")
                    raise
        task = asyncio.current_task()
        assert task is not None and not task.cancelling()
        await asyncio.sleep(0)  # nothing is left to be cancelled

    asyncio.run(work())
    assert ended == ["cancelled"]


def test_finished_work_is_kept_and_errors_are_raised() -> None:
    """Without a disconnect the block runs to its end, or to its error; nobody listens for the client afterwards."""

    async def work(error: Exception | None) -> int:
        made, taken = request(messages := [])
        async with until_disconnect(made):
            await asyncio.sleep(0)
            if error is not None:
                raise error
        await asyncio.sleep(0)
        messages.append({"type": "http.disconnect"})
        for _ in range(5):
            await asyncio.sleep(0)
        assert not taken
        assert len(asyncio.all_tasks()) == 1
        return 3

    assert asyncio.run(work(None)) == 3
    with pytest.raises(RateLimited) as caught:
        asyncio.run(work(RateLimited("later", retry_after_s=0.2)))
    assert error_headers(caught.value) == {"retry-after": "1"}


@pytest.mark.parametrize(("wait_s", "seconds"), [(0.0, "1"), (0.2, "1"), (1.0, "1"), (1.2, "2"), (59.5, "60")])
def test_retry_after_is_never_too_early(wait_s: float, seconds: str) -> None:
    """Whole seconds, rounded up: who comes back before the time is refused again."""
    assert error_headers(RateLimited("later", retry_after_s=wait_s)) == {"retry-after": seconds}


def test_a_cancelled_request_is_no_disconnect() -> None:
    """Whoever cancels the request's task hears CancelledError, whether or not the client has left as well."""

    async def cancelled(left: bool) -> None:
        messages: list[dict[str, Any]] = []
        made, _ = request(messages)

        async def work() -> None:
            async with until_disconnect(made):
                await asyncio.sleep(60)

        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        if left:
            messages.append({"type": "http.disconnect"})
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled(left=False))
    asyncio.run(cancelled(left=True))


def test_a_time_within_the_block_stays_a_time() -> None:
    """TimeoutError of a limit in the block is that, and the disconnect within a limit a disconnect."""

    async def work(messages: list[dict[str, Any]]) -> None:
        made, _ = request(messages)
        async with until_disconnect(made), asyncio.timeout(0 if not messages else 60):
            await asyncio.sleep(60)

    with pytest.raises(TimeoutError):
        asyncio.run(work([]))
    with pytest.raises(ClientDisconnect):
        asyncio.run(work([{"type": "http.disconnect"}]))


def test_a_body_that_stops_is_answered_and_its_connection_closed() -> None:
    """Eight megabytes are announced, one byte comes: the client is told so, and holds nothing."""

    async def answer(request: Request) -> Response:
        try:
            await read_body(request, 8_000_000, timeout_s=0.1)
        except RequestTimeout as error:
            return PlainTextResponse(error.message, error.status, error_headers(error))
        raise AssertionError

    async def run() -> bytes:
        async with server(answer) as (reader, writer):
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 8000000\r\n\r\nx")
            return await asyncio.wait_for(reader.read(), PATIENCE_S)

    told = asyncio.run(run())
    assert told.startswith(b"HTTP/1.1 408 ")
    assert b"Only 1 bytes" in told


def test_a_body_that_arrives_has_more_time() -> None:
    """What has come counts at the least rate: 64 KiB are one second more."""

    async def run(size: int) -> int:
        parts = asyncio.Queue[dict[str, Any]]()
        parts.put_nowait(part(b"x" * size, True))
        asyncio.get_running_loop().call_later(0.3, parts.put_nowait, part(b"end", False))
        made = Request({"type": "http", "method": "POST", "path": "/", "headers": []}, parts.get)
        return len(await read_body(made, 8_000_000, timeout_s=0.05))

    assert asyncio.run(run(1_000_000)) == 1_000_003
    with pytest.raises(RequestTimeout, match="10 bytes"):
        asyncio.run(run(10))
