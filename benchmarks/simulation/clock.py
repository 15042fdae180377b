"""Virtual time: a queue of callbacks, run in the order of their moments, then of their scheduling.

Knows nothing of what it runs.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable


class VirtualClock:
    """Time stands still while a callback runs."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._scheduled = 0

    def __call__(self) -> float:
        """Return the moment it is, in seconds from the start."""
        return self.now_s

    def at(self, moment_s: float, callback: Callable[[], None]) -> None:
        """Run ``callback`` at a moment. Raises ValueError for one that is past."""
        if moment_s < self.now_s:
            raise ValueError(f"{moment_s} s is past; it is {self.now_s} s")
        self._scheduled += 1
        heapq.heappush(self._events, (moment_s, self._scheduled, callback))

    def after(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Run ``callback`` after a delay."""
        self.at(self.now_s + delay_s, callback)

    def run(self) -> None:
        """Run until nothing is scheduled."""
        while self._events:
            self.now_s, _, callback = heapq.heappop(self._events)
            callback()
