"""The stream of events to a watcher over HTTP (docs/reference/api.md)."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from serve_app.api import format as sse
from serve_app.ingress.http import until_gone
from serve_app.live.live import Live
from serve_app.live.view import LiveEvent, Watcher, encoded

CHECK_S = 2.0
"""The interval between checks of a watcher's key."""
WAIT_S = 1.0
"""After this time without an event, a comment shows that the stream is alive."""


class LiveEventStream(StreamingResponse):
    """The answer to one watcher; it ends the watcher in every case. ``allowed``: whether the stream may continue."""

    def __init__(self, live: Live, viewer: str | None, watcher: Watcher, allowed: Callable[[], bool]) -> None:
        super().__init__(self._frames(), headers=sse.HEADERS, media_type=sse.CONTENT_TYPE)
        self._live = live
        self._viewer = viewer
        self._watcher = watcher
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the watcher leaves, its key expires or the server stops."""
        departure = asyncio.ensure_future(until_gone(receive))
        departure.add_done_callback(lambda _: self._watcher.end("gone"))
        try:
            async with asyncio.timeout(None) as self._watcher.limit:
                await self.stream_response(send)
        except (TimeoutError, OSError):
            pass
        finally:
            self._watcher.limit = None  # it is over, and the client may be known to be gone only now
            self._live.leave(self._viewer, self._watcher)
            departure.cancel()
            await asyncio.gather(departure, return_exceptions=True)

    async def _frames(self) -> AsyncIterator[bytes]:
        yield b"retry: 2000\n\n"
        watcher, number = self._watcher, 0
        checked_s = time.monotonic()
        while watcher.ended is None:
            ready = await watcher.take(WAIT_S)
            if watcher.dropped:
                ready = self._live.resync(self._viewer, watcher)
            now_s = time.monotonic()
            if now_s - checked_s >= CHECK_S:
                checked_s = now_s
                if not self._allowed():
                    watcher.end("key")
                    break
            if ready:
                frames = [_frame(number + index, event) for index, event in enumerate(ready)]
                number += len(frames)
                yield b"".join(frames)
            elif watcher.ended is None:
                yield b":\n\n"  # a comment, which clients ignore
        if watcher.ended != "gone":
            end = encoded({"type": "end", "at_s": round(time.time(), 3), "reason": watcher.ended})
            yield _frame(number, end)


def _frame(number: int, event: LiveEvent) -> bytes:
    return b"id: %d\n" % number + sse.named_event(event.type, event.payload)
