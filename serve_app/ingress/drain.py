"""An ingress' way to its end: it takes no more requests, and answers under way have a time, then end with an error.

Counts answers until their last byte has been sent. One asyncio loop uses it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.errors import Overloaded

LAST_EVENT_S = 2.0
"""How long a client has to take the last event of a stream whose time is over."""

CODE = "server_stopping"


class Drain:
    """``begun``: whether requests are refused; ``over``: whether those that run are ended."""

    def __init__(self) -> None:
        self.begun = False
        self.over = False
        self._answers = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._limits: set[asyncio.Timeout] = set()

    def refuse(self) -> None:
        """Raise Overloaded once the stop has begun."""
        if self.begun:
            raise Overloaded("The server is stopping; send the request again later.", code=CODE, retry_after_s=5)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Count an answer, from its request to its last byte."""
        self._answers += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._answers -= 1
            if not self._answers:
                self._idle.set()

    @asynccontextmanager
    async def limit(self, timeout_s: float) -> AsyncIterator[None]:
        """End the block after a time, or when the stop does. Raises TimeoutError then."""
        async with asyncio.timeout(0 if self.over else timeout_s) as limit:
            self._limits.add(limit)
            try:
                yield
            finally:
                self._limits.discard(limit)

    def broken_off(self) -> Overloaded:
        """Return the error that ends an answer for which there is no time left."""
        message = "The server stopped before the answer was whole; send the request again."
        return Overloaded(message, code=CODE, retry_after_s=5)

    async def run(self, timeout_s: float) -> int:
        """Refuse requests from now on, and return when no answer is under way, or has been ended after its time.

        Returns how many had to be ended.
        """
        self.begun = True
        if await self._idle_within(timeout_s):
            return 0
        self.over = True
        ended, now_s = self._answers, asyncio.get_running_loop().time()
        for limit in self._limits:
            limit.reschedule(now_s)
        await self._idle_within(LAST_EVENT_S)
        return ended

    async def _idle_within(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True


class CountAnswers:
    """ASGI middleware: every HTTP request is an answer under way until all of it was sent."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with self._drain.answering():
            await self._app(scope, receive, send)
