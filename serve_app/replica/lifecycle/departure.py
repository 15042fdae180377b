"""Detects that a replica is being stopped: its own router still lists its peers, but no longer the replica itself.

Serve reports the stop only after the last stream. Knows no engine. Runs in the replica's loop, except ``heard``.
"""

import asyncio
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass

MISSING_S = 1.0
"""A replica that is missing for this long leaves; a shorter absence has other reasons."""

NOTICED_S = 0.3
"""Upper limit, on an idle machine, of the time from the decision until routers know it."""


@dataclass(eq=False)
class Departure:
    """Watches for this replica's absence among the running ones.

    ``leave`` gets the loop's time of the decision; ``stay`` is called if the replica runs again after that.
    """

    replica_id: str
    leave: Callable[[float], None]
    stay: Callable[[], None]
    loop: asyncio.AbstractEventLoop
    leaving: bool = False
    _seen: bool = False
    _missing_since_s: float | None = None
    _reconfiguring: int = 0
    _stopped: bool = False

    def heard(self, names: Set[str]) -> None:
        """Note the running replicas (any thread)."""
        self.loop.call_soon_threadsafe(self._heard, self.replica_id in names)

    @contextmanager
    def reconfiguring(self) -> Iterator[None]:
        """Wrap a ``reconfigure``: Serve removes a replica from the routers meanwhile, though it stays."""
        self._reconfiguring += 1
        try:
            yield
        finally:
            self._reconfiguring -= 1
            if self._missing_since_s is not None:
                self._missing_since_s = self.loop.time()

    def stopped(self) -> None:
        """Note that Serve stops this replica: it leaves now if it has not yet, and ignores later reports."""
        self._stopped = True
        if not self.leaving:
            self._begin()

    def _begin(self) -> None:
        """Leave. The decision's time is that when this replica was first missing, or now if it never was."""
        self.leaving = True
        missing_since_s = self.loop.time() if self._missing_since_s is None else self._missing_since_s
        self.leave(missing_since_s - NOTICED_S)

    def _heard(self, present: bool) -> None:
        if self._stopped:
            return
        if present:
            self._seen, self._missing_since_s = True, None
            if self.leaving:
                self.leaving = False
                self.stay()
        elif self._seen and self._missing_since_s is None:  # a starting replica is missing until it was seen once
            self._missing_since_s = self.loop.time()
            self.loop.call_later(MISSING_S, self._look)

    def _look(self) -> None:
        if self._missing_since_s is None or self.leaving:
            return
        if self._reconfiguring or self.loop.time() - self._missing_since_s < MISSING_S:
            self.loop.call_later(MISSING_S, self._look)
            return
        self._begin()
