"""Shows the client of a stream that it lives while it waits: its head after some seconds, then a sign now and then.

The head is HTTP's 200. Once it is sent, a refusal can only be an event of the stream, and what would have been a header
is a comment. It does not know why the stream waits: for a turn, a replica, or text that a parser holds back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve_app.api import format as sse
from serve_app.errors import WarmpathError
from serve_app.ingress.client_headers import connection_of
from serve_app.ingress.http import CLIENT_LEFT

HEAD_AFTER_S = 4.0
"""After its request was accepted. Until then a refusal has its own HTTP status."""
NEAR_REFUSAL_S = 1.5
"""Longer, while a refusal is near."""
SIGN_EVERY_S = 5.0
"""The time between two looks for silence; so it lasts less than twice as long."""

Dress = Callable[[Response], Response]
"""Adds the headers that all answers of a request have."""


class Lifeline:
    """One stream's. ``begun``: its head is sent, or about to be. Its owner closes it before the stream's last event.

    ``sign``: an event or comment that clients ignore. ``headers``: those known when the request is accepted.
    ``refused``: the last event of a refused stream. ``near``: whether a refusal is, so that it keeps its status.
    """

    def __init__(
        self,
        scope: Scope,
        send: Send,
        sign: bytes = b"",
        headers: Callable[[], Mapping[str, str]] = dict,
        dress: Dress = lambda response: response,
        refused: Callable[[WarmpathError], bytes] = lambda _: b"",
        near: Callable[[], bool] = lambda: False,
    ) -> None:
        self._send, self._sign, self._dress, self._near = send, sign, dress, near
        self._headers, self._early = headers, dict[str, str]()
        self.refused = refused
        self.connection = connection_of(scope, send)
        self.begun = False
        self._sending: asyncio.Task[None] | None = None
        self._waited = False
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(HEAD_AFTER_S, self._look)

    def _look(self) -> None:
        # One timer for a whole stream: its tokens only note that something was sent.
        near = not self.begun and not self._waited and self._near()
        self._waited = True
        self._timer = self._loop.call_later(NEAR_REFUSAL_S if near else SIGN_EVERY_S, self._look)
        if near or (self._sending is not None and not self._sending.done()):
            return
        if not self.begun:
            self.begun = True
            self._sending = self._loop.create_task(self._begin_early())
        elif self.connection.silent and self.connection.drained():
            self._sending = self._loop.create_task(self.connection.send(self._sign))
        self.connection.silent = True

    async def _begin_early(self) -> None:
        self._early |= self._headers()
        await self._send(_start(self._dress(StreamHead(self._early))))
        await self.connection.send(self._sign)

    async def begin(self, head: Response, told: Mapping[str, str], send: Send) -> None:
        """Send the stream's head. If the client has one, send those headers in ``told`` that it lacks, as comments."""
        if not self.begun:
            self.begun = True
            await send(_start(head))
            return
        await self.settle()
        late = ((name, value) for name, value in told.items() if self._early.get(name) != value)
        await self.connection.send(b"".join(sse.comment(f"{name}: {value}") for name, value in late))

    async def settle(self) -> None:
        """Return when what was begun to be sent is sent."""
        if self._sending is not None:
            await self._sending

    def close(self) -> bool:
        """Give no further signs; return whether the client has a head."""
        self._timer.cancel()
        return self.begun


class StreamHead(Response):
    """The head of a stream."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        super().__init__(headers={**sse.HEADERS, **headers, "content-type": sse.CONTENT_TYPE})
        del self.headers["content-length"]


class StreamResponse(StreamHead):
    """An answer as a stream, which is counted at its end. ``ended`` hears its status: 499 if its client left before."""

    ended: Callable[[int], None] = staticmethod(lambda _: None)


class RefusedStream(StreamResponse):
    """The rest of a stream that is refused after its head."""

    def __init__(self, lifeline: Lifeline, error: WarmpathError) -> None:
        super().__init__({})
        self._lifeline, self._error = lifeline, error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the error as the stream's last event."""
        status = CLIENT_LEFT
        try:
            await self._lifeline.settle()
            await send({"type": "http.response.body", "body": self._lifeline.refused(self._error), "more_body": False})
            status = self.status_code
        finally:
            self.ended(status)


def _start(head: Response) -> dict[str, object]:
    return {"type": "http.response.start", "status": head.status_code, "headers": head.raw_headers}


def lifeline_of(request: Request) -> Lifeline | None:
    """Return the lifeline of an accepted stream, None for another request."""
    found: Lifeline | None = getattr(request.state, "lifeline", None)
    return found
