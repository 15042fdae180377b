"""Requests that no replica can take yet: tenants take turns, one request at a time asks again. One loop uses it."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


class WaitQueue:
    """``pause``: called with the number of attempts so far, returns when it is time for the next."""

    def __init__(self, pause: Callable[[int], Awaitable[None]]) -> None:
        self._pause = pause
        self._lines: OrderedDict[str, deque[asyncio.Event]] = OrderedDict()
        self._asking: asyncio.Event | None = None

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    async def take(self, choose: Callable[[], T | None], tenant: str = "", *, ahead: bool = False) -> T:
        """Return what ``choose`` does once it is not None. ``ahead``: in front of all, for who had a turn before."""
        if not self._lines or ahead:
            found = choose()
            if found is not None:
                return found
        place = asyncio.Event()
        line = self._lines.setdefault(tenant, deque())
        if ahead:
            line.appendleft(place)
            self._lines.move_to_end(tenant, last=False)
            self._asking = place
        else:
            line.append(place)
            self._asking = self._asking or place
        try:
            attempt = 0
            while True:
                while self._asking is not place:
                    await place.wait()
                    place.clear()
                found = choose()
                if found is not None:
                    self._lines.move_to_end(tenant)
                    return found
                await self._pause(attempt)
                attempt += 1
        finally:
            line.remove(place)
            if not line:
                del self._lines[tenant]
            if self._asking is place:
                self._asking = next(iter(self._lines.values()))[0] if self._lines else None
                if self._asking is not None:
                    self._asking.set()
