"""One watcher's queue. It is bounded, and never makes a sender wait."""

import asyncio
from collections import deque
from typing import Literal, NamedTuple

End = Literal["key", "stopping", "gone"]

QUEUE_EVENTS = 512
QUEUE_BYTES = 1 << 20
GATHER_S = 0.1
"""Events within this time are sent together: one write per event would cost more than everything else."""

LAST_EVENT_S = 1.0
"""The time that a watcher has to read the end of its stream."""


class LiveEvent(NamedTuple):
    """``payload``: JSON on one line."""

    type: str
    payload: bytes


class Watcher:
    """The queue of one stream. ``dropped``: lost events. ``ended``: the reason for its end. ``limit``: its timeout."""

    def __init__(self) -> None:
        self.dropped = 0
        self.ended: End | None = None
        self.limit: asyncio.Timeout | None = None
        self._queue: deque[LiveEvent] = deque()
        self._bytes = 0
        self._ready = asyncio.Event()

    def offer(self, event: LiveEvent) -> None:
        """Add an event. If the queue is full, drop the oldest ones."""
        self._queue.append(event)
        self._bytes += len(event.payload)
        while self._queue and (len(self._queue) > QUEUE_EVENTS or self._bytes > QUEUE_BYTES):
            self._bytes -= len(self._queue.popleft().payload)
            self.dropped += 1
        self._ready.set()

    def end(self, reason: End) -> None:
        """End the stream, within ``LAST_EVENT_S`` if its reader takes nothing."""
        if self.ended is None:
            self.ended = reason
            self._ready.set()
            if self.limit is not None:
                self.limit.reschedule(asyncio.get_running_loop().time() + LAST_EVENT_S)

    async def take(self, timeout_s: float) -> list[LiveEvent]:
        """Return the queued events, after at most ``timeout_s``, or none after a loss: they are outdated then."""
        if not self._queue and self.ended is None:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._ready.wait()
            except TimeoutError:
                return []
            if self.ended is None:
                await asyncio.sleep(GATHER_S)
        self._ready.clear()
        if self.dropped:
            self.dropped += len(self._queue)
        taken = [] if self.dropped else list(self._queue)
        self._queue.clear()
        self._bytes = 0
        return taken
