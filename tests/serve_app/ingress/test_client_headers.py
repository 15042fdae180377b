"""A client's orders to Ray Serve are dropped before Ray reads them; a connection belongs to its own loop."""

import asyncio
import pickle
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from ray.serve._private.http_util import _apply_middlewares, parse_disconnect_disabled_header
from ray.serve._private.utils import call_function_from_import_path
from starlette.requests import Request

from serve_app.api.request import CompletionRequest
from serve_app.ingress.client_headers import ClientHeaders, arrived_s, client_headers, connection_of, with_session
from serve_app.ingress.connections import CLIENT_HEADERS
from tests.serve_app.ingress.scripted import PATIENCE_S, server

KEPT = [(b"host", b"x"), (b"authorization", b"Bearer k"), (b"traceparent", b"00-1-2-01")]

ASKED = CompletionRequest(model="m", prompts=("Hi",))


async def unused(*_: Any) -> Any:
    raise AssertionError


def seen_by_ray(*headers: tuple[bytes, bytes]) -> tuple[list[tuple[bytes, bytes]], dict[bytes, bytes]]:
    """Return the request's headers as Ray's code gets them, and the answer's, in Ray's order of middlewares."""
    seen: list[Any] = []
    answered: dict[bytes, bytes] = {}

    async def rays_code(scope: Any, receive: Any, send: Any) -> None:
        seen.extend(scope["headers"])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        answered.update(message["headers"])

    application = _apply_middlewares(rays_code, call_function_from_import_path(CLIENT_HEADERS))
    asyncio.run(application({"type": "http", "headers": list(headers)}, unused, send))
    return seen, {name.lower(): value for name, value in answered.items()}


@pytest.mark.parametrize(
    "header",
    [
        (b"x-request-timeout-seconds", b"\xff"),
        (b"x-request-disconnect-disabled", b"?1"),
        (b"Serve-Multiplexed-Model-Id", b"\xff"),
        (b"x_session_id", b"other"),
        (b"x-serve-router-target", b"other"),
    ],
)
def test_rays_headers_are_dropped(header: tuple[bytes, bytes]) -> None:
    """Every spelling that Ray accepts is dropped; all else stays."""
    seen, _ = seen_by_ray(*KEPT[:1], header, *KEPT[1:])
    assert [one for one in seen if one[0] != b"x-request-id"] == KEPT
    assert not parse_disconnect_disabled_header(dict(seen))


def test_a_clients_session_is_kept_by_another_name() -> None:
    """By its own name Ray would choose a replica by it."""
    seen, _ = seen_by_ray(*KEPT, (b"X-Session-Id", b"one"))
    assert [one for one in seen if one[0] != b"x-request-id"] == [*KEPT, (b"x-warmpath-session", b"one")]
    assert with_session(ASKED, {"x-warmpath-session": "one", "session-id": "two"}).session == "one"


@pytest.mark.parametrize(
    ("headers", "session", "parent"),
    [
        ({"x-dynamo-session-id": "one", "x-dynamo-parent-session-id": "two"}, "one", "two"),
        ({"x-session-affinity": "one", "x-parent-session-id": "two"}, "one", "two"),
        ({"session-id": "one", "x-codex-parent-thread-id": "two"}, "one", "two"),
        ({"x-claude-code-session-id": "one", "x-claude-code-agent-id": "a"}, "one/a", "one"),
        (
            {"x-claude-code-session-id": "one", "x-claude-code-agent-id": "b", "x-claude-code-parent-agent-id": "a"},
            "one/b",
            "one/a",
        ),
        ({"x-claude-code-agent-id": "a", "x-dynamo-parent-session-id": "x" * 257}, "", ""),
    ],
)
def test_headers_name_the_session_that_began_a_session(headers: dict[str, str], session: str, parent: str) -> None:
    found = with_session(ASKED, headers)
    assert (found.session, found.parent, found.final) == (session, parent, False)


@pytest.mark.parametrize(
    ("value", "final"), [("true", True), ("1", True), ("True", True), ("false", False), ("", False)]
)
def test_a_header_ends_the_session(value: str, final: bool) -> None:
    assert with_session(ASKED, {"x-dynamo-session-final": value}).final == final
    assert with_session(replace(ASKED, final=True), {"x-dynamo-session-final": value}).final


@pytest.mark.parametrize(
    ("value", "valid"),
    [(b"\xff\xfe", False), (b"", False), (b"two words", False), (b"x" * 129, False), (b"a\x01b", False),
     (b"req-1", True), (b"x" * 128, True)],
)  # fmt: skip
def test_one_printable_word_comes_back_as_a_requests_id(value: bytes, valid: bool) -> None:
    """Ray would fail to read or return any other value; it makes its own id."""
    seen, answered = seen_by_ray(*KEPT, (b"x-request-id", value))
    made = dict(seen)[b"x-request-id"]
    assert (made == value) is valid
    assert answered[b"x-request-id"] == made != b""
    assert client_headers([(b"x-request-id", b"a"), (b"x-request-id", b"b")]) == []


def test_a_connection_of_another_loop_is_left_to_serve() -> None:
    """By default Serve runs the application in its own loop; and a proxy of Serve pickles the scope."""
    scope: dict[str, Any] = {"type": "http", "headers": []}

    took: list[str] = []

    async def send(message: Any) -> None:
        took.append("serve")

    async def direct(message: Any) -> None:
        took.append("server")

    async def server(scope: Any, receive: Any, _: Any) -> None:
        await connection_of(scope, send).send(b"x")
        await connection_of(pickle.loads(pickle.dumps(scope)), send).send(b"x")  # noqa: S301  # its own

    async def application() -> None:
        await connection_of(scope, send).send(b"x")

    asyncio.run(ClientHeaders(server)(scope, unused, direct))
    asyncio.run(application())
    assert took == ["server", "serve", "serve"]


def test_direct_writes_wait_for_nothing() -> None:
    """A server's ``send`` waits only for a slow client, and then the connection is not open."""
    sent: list[bytes] = []

    class Cycle:
        flow = SimpleNamespace(write_paused=False)

        async def send(self, message: Any) -> None:
            if self.flow.write_paused:
                await asyncio.sleep(0)
            sent.append(message["body"])

    async def server(scope: Any, receive: Any, _: Any) -> None:
        connection = connection_of(scope, unused)
        assert connection.open()
        connection.write(b"a")
        connection.write(b"")
        Cycle.flow.write_paused = True
        assert not connection.open()
        with pytest.raises(RuntimeError, match="waits for more"):
            connection.write(b"b")
        assert not connection_of({}, unused).open()

    asyncio.run(ClientHeaders(server)({"type": "http", "headers": []}, unused, Cycle().send))
    assert sent == [b"a"]


def test_a_request_arrives_when_the_server_has_it() -> None:
    """Its time to the first token contains all layers of Ray before the route; another process' clock is not used."""
    scope: dict[str, Any] = {"type": "http", "headers": []}
    asyncio.run(ClientHeaders(AsyncMock())(scope, unused, unused))
    begun_s = arrived_s(scope)
    assert begun_s == arrived_s(scope) < time.perf_counter()
    assert arrived_s(pickle.loads(pickle.dumps(scope))) > begun_s  # noqa: S301  # its own
    assert arrived_s({"type": "http"}) > begun_s


@pytest.mark.parametrize("length", [None, b"12"])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_http_1_0_has_no_chunks(version: str, length: bytes | None) -> None:
    """A stream ends with its connection there, also if HAProxy keeps that open; the events are the same."""
    sent = b"one", b"", b"two", b"three!"

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        headers = [] if length is None else [(b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        connection = connection_of(scope, send)
        for part in sent:
            await connection.send(part)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def answer(request: Request) -> Any:
        async def respond(scope: Any, receive: Any, send: Any) -> None:
            await ClientHeaders(stream)(scope, receive, send)

        return respond

    async def run() -> bytes:
        async with server(answer) as (reader, writer):
            kept = "Connection: keep-alive\r\n" if version == "1.0" and length is None else "Connection: close\r\n"
            writer.write(f"GET / HTTP/{version}\r\nHost: x\r\n{kept}\r\n".encode())
            return await asyncio.wait_for(reader.read(), PATIENCE_S)

    head, _, body = asyncio.run(run()).partition(b"\r\n\r\n")
    chunked = version == "1.1" and length is None
    assert (b"transfer-encoding" in head) == chunked
    assert b"connection: close" in head
    assert body == (b"3\r\none\r\n3\r\ntwo\r\n6\r\nthree!\r\n0\r\n\r\n" if chunked else b"onetwothree!")
