"""Virtual time, in seconds from the start: it advances by sleeping, or from one callback to the next."""

import heapq
from collections.abc import Callable


class VirtualClock:
    """A simulation's clock and ``sleep``; callbacks run in the order of their times, then of scheduling."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._scheduled = 0

    def __call__(self) -> float:
        """Return the current time."""
        return self.now_s

    def sleep(self, seconds: float) -> None:
        """Advance by ``seconds``, and run the callbacks that are due by then."""
        until_s = self.now_s + seconds
        self.run(until_s)
        self.now_s = until_s

    def at(self, moment_s: float, callback: Callable[[], None]) -> None:
        """Schedule ``callback`` for a time. Raises ValueError for a past time."""
        if moment_s < self.now_s:
            raise ValueError(f"{moment_s} s is past; it is {self.now_s} s")
        self._scheduled += 1
        heapq.heappush(self._events, (moment_s, self._scheduled, callback))

    def after(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Schedule ``callback`` after a delay."""
        self.at(self.now_s + delay_s, callback)

    def run(self, until_s: float = float("inf")) -> None:
        """Run the callbacks that are scheduled up to ``until_s``."""
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, callback = heapq.heappop(self._events)
            callback()
