"""Around all of Ray: the headers that clients may set, and a short way for an answer's bytes. Knows no routes.

Ray asks ``middlewares`` in every process that listens for HTTP, by RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH: an
application's own middleware would come after Ray, which takes orders from headers.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from dataclasses import dataclass

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
_VALID_REQUEST_ID = re.compile(rb"[!-~]{1,128}")


def client_headers(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return ``headers`` without Ray's, and without an ``x-request-id`` that is not one short printable word."""
    kept = [
        (name, value)
        for name, value in headers
        if (plain := _plain(name)) not in _RAYS and not plain.startswith(_RAYS_PREFIX)
    ]
    request_ids = [value for name, value in kept if name.lower() == _REQUEST_ID]
    if request_ids and not (len(request_ids) == 1 and _VALID_REQUEST_ID.fullmatch(request_ids[0])):
        return [(name, value) for name, value in kept if name.lower() != _REQUEST_ID]
    return kept


_CONNECTION = "warmpath.connection"


@dataclass(frozen=True, slots=True)
class Connection:
    """A connection's own ``send``, and the loop that has it; empty in another process."""

    send: Send | None = None
    loop: asyncio.AbstractEventLoop | None = None

    def __reduce__(self) -> tuple[type[Connection], tuple[()]]:
        """Serve's proxies pickle what they know of a request."""
        return Connection, ()


def connection_send(scope: Scope, send: Send) -> Send:
    """Return the ``send`` of the connection itself, for the middle of a body; ``send`` where that cannot be used.

    The layers of Ray and the application look at the start and the end of an answer alone. Behind a proxy, or where
    Serve runs the application in a loop of its own, as by default, the connection is somebody else's.
    """
    connection = scope.get(_CONNECTION)
    if isinstance(connection, Connection) and connection.loop is asyncio.get_running_loop():
        return connection.send or send
    return send


class ClientHeaders:
    """ASGI middleware, the outermost: the application behind it sees ``client_headers`` alone."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        scope[_CONNECTION] = Connection(send, asyncio.get_running_loop())
        if "headers" in scope:
            scope["headers"] = client_headers(scope["headers"])
        await self._app(scope, receive, send)


def middlewares() -> list[Middleware]:
    """Return what Ray is to put around the applications it serves."""
    return [Middleware(ClientHeaders)]
