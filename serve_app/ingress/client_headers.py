"""Around all of Ray: the headers that clients may set, and a short way for an answer's bytes. Knows no routes.

Ray asks ``middlewares`` in every process that listens for HTTP, by RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH: an
application's own middleware would come after Ray, which takes orders from headers.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.ray_compat import header_names


def _plain(name: bytes) -> bytes:
    # Ray takes - and _ for the same in some of its names.
    return name.lower().replace(b"_", b"-")


_ORDERS, _ORDERS_PREFIX, _ID = header_names()
_RAYS = frozenset(_plain(name.encode()) for name in _ORDERS)
_RAYS_PREFIX = _plain(_ORDERS_PREFIX.encode())
_REQUEST_ID = _ID.encode()
_SESSION, _KEPT_SESSION = b"x-session-id", b"x-warmpath-session"
"""A client's word for its session, and what it is called past Ray, which would choose a replica by it."""
_SESSIONS = (_KEPT_SESSION.decode(), _SESSION.decode(), "x-claude-code-session-id", "session-id")
"""The headers by which clients name sessions, the most telling first; the last two are Claude Code's and Codex'."""
_MOST_SESSION_CHARS = 256
_VALID_REQUEST_ID = re.compile(rb"[!-~]{1,128}")


def client_headers(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return ``headers`` without Ray's, and without an ``x-request-id`` that is not one short printable word.

    The client's word for its session has another name among them.
    """
    kept = [
        (name, value)
        for name, value in map(_renamed, headers)
        if (plain := _plain(name)) not in _RAYS and not plain.startswith(_RAYS_PREFIX)
    ]
    request_ids = [value for name, value in kept if name.lower() == _REQUEST_ID]
    if request_ids and not (len(request_ids) == 1 and _VALID_REQUEST_ID.fullmatch(request_ids[0])):
        return [(name, value) for name, value in kept if name.lower() != _REQUEST_ID]
    return kept


def _renamed(header: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
    return (_KEPT_SESSION, header[1]) if header[0].lower() == _SESSION else header


def session_of(headers: Mapping[str, str]) -> str:
    """Return a client's word for its session, "" for none. ``headers``: in lower case; what is too long is none."""
    words = (headers.get(name, "") for name in _SESSIONS)
    return next((word for word in words if 0 < len(word) <= _MOST_SESSION_CHARS), "")


_CONNECTION = "warmpath.connection"


@dataclass(frozen=True, slots=True)
class _Outermost:
    """The server's own ``send``, and the loop that has it; empty in another process."""

    send: Send | None = None
    loop: asyncio.AbstractEventLoop | None = None

    def __reduce__(self) -> tuple[type[_Outermost], tuple[()]]:
        """Serve's proxies pickle what they know of a request."""
        return _Outermost, ()


class Connection:
    """Takes the middle of a body. ``flow``: the server's of the connection, None where it is not known."""

    def __init__(self, send: Send, flow: Any) -> None:
        self._send = send
        self._flow = flow

    def open(self) -> bool:
        """Whether ``write`` can be used now: the client keeps up."""
        return self._flow is not None and not self._flow.write_paused

    def write(self, part: bytes) -> None:
        """Send a part at once, while it is ``open``."""
        try:
            self.send(part).send(None)  # the server's ``send`` waits for nothing but the client
        except StopIteration:
            return
        raise RuntimeError("the server's send waits for more than its client")

    async def send(self, part: bytes) -> None:
        """Send a part, once the client keeps up."""
        if part:
            await self._send({"type": "http.response.body", "body": part, "more_body": True})


def connection_of(scope: Scope, send: Send) -> Connection:
    """Return the connection itself, for the middle of a body; ``send`` alone where that cannot be used.

    The layers of Ray and the application look at the start and the end of an answer alone. Behind a proxy, or where
    Serve runs the application in a loop of its own, as by default, the connection is somebody else's.
    """
    outermost = scope.get(_CONNECTION)
    if isinstance(outermost, _Outermost) and outermost.loop is asyncio.get_running_loop() and outermost.send:
        cycle = getattr(outermost.send, "__self__", None)  # of uvicorn
        return Connection(outermost.send, getattr(cycle, "flow", None))
    return Connection(send, None)


class ClientHeaders:
    """ASGI middleware, the outermost: the application behind it sees ``client_headers`` alone."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        scope[_CONNECTION] = _Outermost(send, asyncio.get_running_loop())
        if "headers" in scope:
            scope["headers"] = client_headers(scope["headers"])
        await self._app(scope, receive, send)


def middlewares() -> list[Middleware]:
    """Return what Ray is to put around the applications it serves."""
    return [Middleware(ClientHeaders)]
