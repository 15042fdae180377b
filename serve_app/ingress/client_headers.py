"""The outermost ASGI middleware: it filters clients' headers, and offers a short path for an answer's bytes.

Ray calls ``middlewares`` in every process that listens for HTTP (RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH). An
application's own middleware would run after Ray, which obeys some headers.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.background import run_in_background
from serve_app.api.hints import MOST_WORD_CHARS, is_true
from serve_app.api.openai.response import openai_error
from serve_app.api.request import RequestFields
from serve_app.ingress.connections import AddressBounds, ListeningSocket, guard_of, listeners_of
from serve_app.ingress.http import error_headers, json_response
from serve_app.ingress.local_socket import listen_beside_ports
from serve_app.ray_compat import header_names


def _plain(name: bytes) -> bytes:
    # Ray treats - and _ as equal in some of its names.
    return name.lower().replace(b"_", b"-")


NAMES_KEPT = 256
"""Names of headers, and of hosts, whose check is remembered: clients send few."""

_ORDERS, _ORDERS_PREFIX, _ID = header_names()
_RAYS = frozenset(_plain(name.encode()) for name in _ORDERS)
_RAYS_PREFIX = _plain(_ORDERS_PREFIX.encode())
_REQUEST_ID = _ID.encode()
_SESSION, _KEPT_SESSION = b"x-session-id", b"x-warmpath-session"
"""A client's session header, and its name behind Ray, which would choose a replica by the original."""
_SESSIONS = (
    _KEPT_SESSION.decode(), _SESSION.decode(), "x-claude-code-session-id", "session-id", "x-session-affinity",
    "x-dynamo-session-id",
)  # fmt: skip
"""The headers in which clients name sessions, by precedence; the last are Claude Code's, Codex's, OpenCode's, Dynamo's.
"""
_PARENTS = ("x-dynamo-parent-session-id", "x-parent-session-id", "x-codex-parent-thread-id")
"""The headers in which Dynamo's clients, OpenCode and Codex name the session that began theirs."""
_AGENT, _PARENT_AGENT = "x-claude-code-agent-id", "x-claude-code-parent-agent-id"
"""Claude Code's, for sub-agents of one session."""
_FINAL = "x-dynamo-session-final"
_VALID_REQUEST_ID = re.compile(rb"[!-~]{1,128}")


def client_headers(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return ``headers`` without Ray's, and without an ``x-request-id`` unless it is one short printable word.

    The client's session header is renamed.
    """
    kept = [(kept_name, value) for name, value in headers if (kept_name := _name_behind_ray(name)) is not None]
    request_ids = [value for name, value in kept if name.lower() == _REQUEST_ID]
    if request_ids and not (len(request_ids) == 1 and _VALID_REQUEST_ID.fullmatch(request_ids[0])):
        return [(name, value) for name, value in kept if name.lower() != _REQUEST_ID]
    return kept


@lru_cache(NAMES_KEPT)
def _name_behind_ray(name: bytes) -> bytes | None:
    """Return the name of a client's header behind Ray, None for one of Ray's own."""
    renamed = _KEPT_SESSION if name.lower() == _SESSION else name
    plain = _plain(renamed)
    return None if plain in _RAYS or plain.startswith(_RAYS_PREFIX) else renamed


R = TypeVar("R", bound=RequestFields)


def with_session(request: R, headers: Mapping[str, str]) -> R:
    """Return a request with what its headers say of its session. ``headers``: with names in lower case."""
    session, parent = _word(headers, _SESSIONS), _word(headers, _PARENTS)
    if session and (agent := _word(headers, (_AGENT,))):
        above = _word(headers, (_PARENT_AGENT,))
        session, parent = f"{session}/{agent}", parent or (f"{session}/{above}" if above else session)
    final = request.final or is_true(headers.get(_FINAL))
    if not session and not parent and final == request.final:
        return request
    return replace(request, session=session or request.session, parent=parent or request.parent, final=final)


def _word(headers: Mapping[str, str], names: Iterable[str]) -> str:
    """Return the first of some headers that is there and not too long, "" for none."""
    words = (headers.get(name, "") for name in names)
    return next((word for word in words if 0 < len(word) <= MOST_WORD_CHARS), "")


_CONNECTION = "warmpath.connection"


@dataclass(frozen=True, slots=True)
class _Outermost:
    """The server's own ``send``, its event loop and the time of arrival there; empty in another process."""

    send: Send | None = None
    loop: asyncio.AbstractEventLoop | None = None
    arrived_s: float | None = None

    def __reduce__(self) -> tuple[type[_Outermost], tuple[()]]:
        """Pickle as empty: Serve's proxies pickle a request's scope."""
        return _Outermost, ()


class Connection:
    """Sends the middle of a body. ``cycle``: the server's own state of the request (uvicorn's), None if unknown.

    ``silent``: whoever sets it learns later whether something was sent since.
    """

    def __init__(self, send: Send, cycle: Any = None) -> None:
        self._send = send
        self._cycle = cycle
        self._flow = getattr(cycle, "flow", None)
        self._transport = getattr(cycle, "transport", None)
        self.silent = False

    def open(self) -> bool:
        """Return whether the client keeps up, so that ``write`` can be used now."""
        return self._flow is not None and not self._flow.write_paused

    def drained(self) -> bool:
        """Return whether nothing that was sent waits here for the client, as far as is known."""
        return self._transport is None or not self._transport.get_write_buffer_size()

    def write(self, part: bytes) -> None:
        """Send a part at once, while the connection is ``open``."""
        cycle: Any = self._cycle
        chunked = getattr(cycle, "chunked_encoding", None) and cycle.response_started and not cycle.response_complete
        if part and chunked and not cycle.disconnected:
            # What the server's ``send`` would write, without its message and its coroutine: a third of a token's calls.
            self.silent = False
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))
            return
        # One step of the coroutine by hand: while the client keeps up the server's ``send`` ends in that step, and a
        # task for it would cost a turn of the loop a token. ``open`` guarantees that it does not wait.
        try:
            self.send(part).send(None)
        except StopIteration:
            return
        raise RuntimeError("the server's send waits for more than its client")

    async def send(self, part: bytes) -> None:
        """Send a part, once the client keeps up."""
        if part:
            self.silent = False
            await self._send({"type": "http.response.body", "body": part, "more_body": True})


def connection_of(scope: Scope, send: Send) -> Connection:
    """Return the connection itself for the middle of a body, or a wrapper of ``send`` if it cannot be used.

    The layers of Ray and the application need only the start and the end of an answer. Behind a proxy, or if Serve
    runs the application in a separate loop (the default), another process or loop has the connection.
    """
    outermost = scope.get(_CONNECTION)
    if isinstance(outermost, _Outermost) and outermost.loop is asyncio.get_running_loop() and outermost.send:
        return Connection(outermost.send, getattr(outermost.send, "__self__", None))
    return Connection(send)


def arrived_s(scope: Scope) -> float:
    """Return when a request reached this process, by ``time.perf_counter``; now if that is not known."""
    outermost = scope.get(_CONNECTION)
    arrival = outermost.arrived_s if isinstance(outermost, _Outermost) else None
    return time.perf_counter() if arrival is None else arrival


def until_closed(send: Send) -> Send:
    """Return ``send`` for HTTP/1.0, where a body of unknown length ends with its connection (RFC 9112 6.1).

    uvicorn would send chunks. HAProxy asks in its client's version, and passes such an answer on.
    """
    cycle: Any = getattr(send, "__self__", None)
    if not hasattr(cycle, "chunked_encoding"):  # h11 does this by itself
        return send
    unknown_length = False

    async def plain(message: Message) -> None:
        nonlocal unknown_length
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", ())}
            unknown_length = b"content-length" not in names and message["status"] not in (204, 304)
            if unknown_length:
                cycle.chunked_encoding, cycle.keep_alive = False, False
        elif unknown_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return plain


class ClientHeaders:
    """The outermost ASGI middleware: the application behind it sees only ``client_headers``."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._addresses = AddressBounds()
        self._watching: asyncio.Task[None] | None = None
        self._listeners: list[ListeningSocket] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on; the first one shows the connections to watch."""
        loop = asyncio.get_running_loop()
        if self._watching is None and (guard := guard_of(send)) is not None:
            self._watching = run_in_background(guard.run)
            self._listeners = listeners_of(send)
        for listener in self._listeners:
            listener.accept_waiting()
        if scope.get("http_version") == "1.0":
            send = until_closed(send)
        scope[_CONNECTION] = _Outermost(send, loop, time.perf_counter())
        if "headers" in scope:
            if (error := self._addresses.refusal(scope)) is not None:
                headers = {**error_headers(error), "connection": "close"}
                await json_response(openai_error(error, "").body, error.status, headers)(scope, receive, send)
                return
            scope["headers"] = client_headers(scope["headers"])
        with self._addresses.counted(scope):
            await self._app(scope, receive, send)


def middlewares() -> list[Middleware]:
    """Return the middlewares that Ray puts around its applications, before each process listens."""
    listen_beside_ports()
    return [Middleware(ClientHeaders)]
