"""Bodies are bounded, disconnects end work, errors carry Retry-After."""

import asyncio
import gzip
import tracemalloc
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response

from serve_app.errors import (
    AuthenticationFailed,
    InvalidRequest,
    RateLimited,
    RequestTimeout,
    RequestTooLarge,
    UnsupportedEncoding,
    WarmpathError,
)
from serve_app.ingress.http import GZIP_STEP_BYTES, credentials, error_headers, has_left, read_body, until_disconnect
from tests.serve_app.ingress.scripted import PATIENCE_S, server

LEFT = {"type": "http.disconnect"}


def request(messages: list[dict[str, Any]], headers: dict[str, str] | None = None) -> Request:
    """Return a request with a receive channel that yields ``messages`` and then waits forever."""

    async def receive() -> dict[str, Any]:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop(0)

    raw = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": raw}, receive)


def part(body: bytes, more: bool) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


WORDS = st.sampled_from(["", "k", "K", "key", "key k", "é"])


@given(
    scheme=st.sampled_from([None, "", "Bearer", "bearer", "BEARER", "Basic", "Digest", "Bearerkey", "key"]),
    sent=WORDS,
    spaces=st.sampled_from([" ", "  "]),
    key=st.none() | WORDS,
)
def test_a_key_in_two_headers_is_one_key(scheme: str | None, sent: str, spaces: str, key: str | None) -> None:
    """Both must be equal bearer keys: any other credential beside ``x-api-key`` would be ignored."""
    authorization = None if scheme is None else f"{scheme}{spaces}{sent}".strip()
    headers = {"authorization": authorization, "x-api-key": key}
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items() if value is not None]
    asked = Request({"type": "http", "headers": raw})
    words = (authorization or "").split(maxsplit=1)
    if key is None:
        assert credentials(asked) == authorization
    elif not words or (words[0].lower() == "bearer" and "".join(words[1:]) == key):
        assert credentials(asked) == f"Bearer {key}"
    else:
        with pytest.raises(AuthenticationFailed, match="different keys"):
            credentials(asked)


def test_a_body_in_parts_is_joined_up_to_the_bound() -> None:
    """An announced excess length reads nothing, an unannounced one stops at the bound."""
    assert asyncio.run(read_body(request([part(b"abc", True), part(b"de", False)]), 5)) == b"abcde"
    announced, flood = [part(b"x", False)], [part(b"xxxx", True) for _ in range(100)]
    for messages, headers, left in ((announced, {"content-length": "6"}, 1), (flood, {}, 98)):
        with pytest.raises(RequestTooLarge):
            asyncio.run(read_body(request(messages, headers), 5))
        assert len(messages) == left


@given(
    body=st.binary(max_size=300),
    repeats=st.integers(0, 3000),
    cuts=st.lists(st.integers(0, 400), max_size=4),
    max_bytes=st.integers(0, 900_000),
    level=st.integers(0, 9),
    name=st.sampled_from(["gzip", "GZIP", "x-gzip"]),
)
def test_a_body_in_gzip_is_what_it_stands_for(
    body: bytes, repeats: int, cuts: list[int], max_bytes: int, level: int, name: str
) -> None:
    """However it is cut into parts; ``grow`` hears of every byte before it is kept, and the bound is the content's."""
    content = body * repeats
    sent, parts, grown = gzip.compress(content, level, mtime=0), list[bytes](), 0
    for cut in cuts:
        parts, sent = [*parts, sent[:cut]], sent[cut:]
    messages = [part(one, True) for one in parts] + [part(sent, False)]

    def grow(more: int) -> None:
        nonlocal grown
        grown += more

    def read() -> bytes:
        return asyncio.run(read_body(request(messages, {"content-encoding": name}), max_bytes, grow))

    if max(len(content), sum(map(len, (*parts, sent)))) > max_bytes:
        with pytest.raises(RequestTooLarge):
            read()
        assert grown <= max_bytes
    else:
        assert read() == content and grown == len(content)


def test_a_small_body_that_stands_for_a_large_one_is_not_expanded() -> None:
    """100 MB in 100 KB: no more than the bound and one step are made of it, with a turn for others after each step."""
    sent, turns = zlib.compress(bytes(100_000_000), wbits=zlib.MAX_WBITS | 16), 0

    async def run() -> None:
        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        beside = asyncio.create_task(others())
        with pytest.raises(RequestTooLarge):
            await read_body(request([part(sent, False)], {"content-encoding": "gzip"}), 1 << 20)
        beside.cancel()

    tracemalloc.start()
    asyncio.run(run())
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < 4 << 20
    assert turns >= (1 << 20) // GZIP_STEP_BYTES


@pytest.mark.parametrize(
    ("encoding", "sent", "error", "why"),
    [
        ("br", b"x", UnsupportedEncoding, "'br'"),
        ("gzip, gzip", b"x", UnsupportedEncoding, "'gzip, gzip'"),
        ("deflate", zlib.compress(b"x"), UnsupportedEncoding, "or in gzip"),
        ("gzip", b'{"model": "demo"}', InvalidRequest, "not gzip"),
        ("gzip", gzip.compress(b"x" * 99, mtime=0)[:-4], InvalidRequest, "breaks off"),
        ("gzip", b"", InvalidRequest, "breaks off"),
        ("gzip", gzip.compress(b"x", mtime=0) + b"y", InvalidRequest, "one stream"),
        ("gzip", gzip.compress(b"x", mtime=0)[:-8] + b"\0" * 8, InvalidRequest, "not gzip"),
    ],
)
def test_a_body_that_is_not_as_its_encoding_says_is_refused(
    encoding: str, sent: bytes, error: type[WarmpathError], why: str
) -> None:
    """An unknown encoding is a 415 that names a known one (RFC 9110 15.5.16); no fault of a body is ours."""
    with pytest.raises(error, match=why) as caught:
        asyncio.run(read_body(request([part(sent, False)], {"content-encoding": encoding}), 1000))
    assert caught.value.status == (415 if error is UnsupportedEncoding else 400)
    assert error_headers(caught.value) == ({"accept-encoding": "gzip"} if error is UnsupportedEncoding else {})


def test_a_body_that_stops_is_answered_and_its_connection_closed() -> None:
    """Eight megabytes are announced, one byte arrives: the client gets an error, and holds nothing."""

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
    """Received bytes extend the time at the lowest allowed rate: 64 KiB are one second more."""

    async def run(size: int) -> int:
        parts = asyncio.Queue[dict[str, Any]]()
        parts.put_nowait(part(b"x" * size, True))
        asyncio.get_running_loop().call_later(0.3, parts.put_nowait, part(b"end", False))
        made = Request({"type": "http", "method": "POST", "path": "/", "headers": []}, parts.get)
        return len(await read_body(made, 8_000_000, timeout_s=0.05))

    assert asyncio.run(run(1_000_000)) == 1_000_003
    with pytest.raises(RequestTimeout, match="10 bytes"):
        asyncio.run(run(10))


@pytest.mark.parametrize(("wait_s", "seconds"), [(0.0, "1"), (0.2, "1"), (1.0, "1"), (1.2, "2"), (59.5, "60")])
def test_retry_after_is_never_too_early(wait_s: float, seconds: str) -> None:
    """It is in whole seconds, rounded up, because a client that returns early is refused again."""
    assert error_headers(RateLimited("later", retry_after_s=wait_s)) == {"retry-after": seconds}


@pytest.mark.parametrize("limit_s", [None, 60])
def test_work_ends_when_the_client_leaves(limit_s: float | None) -> None:
    """The disconnect cancels the block, also within a limit; its task is then as if it had not been cancelled."""
    ended: list[str] = []

    async def work() -> None:
        with pytest.raises(ClientDisconnect):
            async with until_disconnect(request([LEFT])), asyncio.timeout(limit_s):
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    ended.append("cancelled")
                    raise
        task = asyncio.current_task()
        assert task is not None and not task.cancelling()
        await asyncio.sleep(0)  # no cancellation is pending

    asyncio.run(work())
    assert ended == ["cancelled"]


@pytest.mark.parametrize("error", [None, RateLimited("later"), TimeoutError("a limit's")])
def test_finished_work_is_kept_and_errors_are_raised(error: Exception | None) -> None:
    """Without a disconnect the block runs to its end, or to its error; nobody listens for the client afterwards."""

    async def work() -> None:
        messages: list[dict[str, Any]] = []
        caught = None
        try:
            async with until_disconnect(request(messages)):
                await asyncio.sleep(0)
                if error is not None:
                    raise error
        except Exception as raised:
            caught = raised
        assert caught is error
        await asyncio.sleep(0)
        messages.append(LEFT)
        for _ in range(5):
            await asyncio.sleep(0)
        assert messages == [LEFT]
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(work())


@pytest.mark.parametrize("left", [False, True])
def test_a_cancelled_request_is_no_disconnect(left: bool) -> None:
    """If the request's task is cancelled it gets CancelledError, even if the client leaves during the cleanup."""

    async def cancelled() -> None:
        messages, cleaned = asyncio.Queue[dict[str, Any]](), asyncio.Event()

        async def work() -> None:
            async with until_disconnect(Request({"type": "http"}, messages.get)):
                try:
                    await asyncio.Event().wait()
                finally:
                    await cleaned.wait()

        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        if left:
            messages.put_nowait(LEFT)
        else:
            cleaned.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())


@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize(("messages", "left"), [([LEFT], True), ([part(b"x", False), LEFT], True), ([], False)])
def test_whether_a_client_has_left_is_known_without_waiting(
    messages: list[dict[str, Any]], left: bool, cancelled: bool
) -> None:
    """Also in a task that is being cancelled, which goes on being cancelled."""

    async def work() -> bool:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            found = await has_left(request([*messages]))
            task = asyncio.current_task()
            assert task is not None and task.cancelling() == 1
            return found
        raise AssertionError

    async def run() -> bool:
        if not cancelled:
            return await has_left(request([*messages]))
        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        task.cancel()
        return await task

    assert asyncio.run(run()) is left
