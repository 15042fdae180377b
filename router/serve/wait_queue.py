"""A queue of requests that no replica can accept yet. Tenants take turns, and one request at a time asks again."""

import asyncio
import time
from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from math import inf
from operator import itemgetter
from typing import TypeVar

T = TypeVar("T")


class WaitQueue:
    """A queue for one event loop. ``pause`` waits for the next attempt, given the number of attempts so far.

    ``waited`` gets the seconds of each wait that ended with a result.
    """

    def __init__(
        self, pause: Callable[[int], Awaitable[None]], waited: Callable[[float], None] = lambda _: None
    ) -> None:
        self._pause = pause
        self._waited = waited
        self._lines: OrderedDict[str, deque[tuple[float, asyncio.Event]]] = OrderedDict()
        self._asking: tuple[float, asyncio.Event] | None = None

    async def take(self, choose: Callable[[], T | None], tenant: str = "", order: int = 0, *, ahead: bool = False) -> T:
        """Return the result of ``choose`` once it is not None. ``ahead``: before all others, for a retry.

        A tenant's requests are sorted by ``order``, lowest first, then by arrival.
        """
        if not self._lines or ahead:
            found = choose()
            if found is not None:
                return found
        woken, began_s = asyncio.Event(), time.monotonic()
        place: tuple[float, asyncio.Event] = (-inf if ahead else order, woken)
        line = self._lines.setdefault(tenant, deque())
        if ahead:
            line.appendleft(place)
            self._lines.move_to_end(tenant, last=False)
        else:
            insort(line, place, key=itemgetter(0))
        self._asking = self._first()
        try:
            attempt = 0
            while True:
                while self._asking is not place:
                    await woken.wait()
                    woken.clear()
                found = choose()
                if found is not None:
                    self._lines.move_to_end(tenant)
                    self._waited(time.monotonic() - began_s)
                    return found
                await self._pause(attempt)
                attempt += 1
        finally:
            line.remove(place)
            if not line:
                del self._lines[tenant]
            if self._asking is place:
                self._asking = self._first()
                if self._asking is not None:
                    self._asking[1].set()

    def _first(self) -> tuple[float, asyncio.Event] | None:
        return next(iter(self._lines.values()))[0] if self._lines else None
