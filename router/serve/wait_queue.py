"""Requests that no replica can take yet: first come, first served, and only the first of them asks again.

One asyncio loop uses it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


class WaitQueue:
    """``pause``: called with the number of attempts so far, returns when it is time for the next."""

    def __init__(self, pause: Callable[[int], Awaitable[None]]) -> None:
        self._pause = pause
        self._queue: deque[asyncio.Event] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    async def take(self, choose: Callable[[], T | None], *, ahead: bool = False) -> T:
        """Return what ``choose`` returns, asked in turn until it is not None; its exceptions end the wait.

        ``ahead``: in front of all that wait, for a request that has had its turn before.
        """
        if not self._queue or ahead:
            found = choose()
            if found is not None:
                return found
        place = asyncio.Event()
        if ahead:
            self._queue.appendleft(place)
        else:
            self._queue.append(place)
        try:
            attempt = 0
            while True:
                while self._queue[0] is not place:
                    await place.wait()
                    place.clear()
                found = choose()
                if found is not None:
                    return found
                await self._pause(attempt)
                attempt += 1
        finally:
            self._queue.remove(place)
            if self._queue:
                self._queue[0].set()
