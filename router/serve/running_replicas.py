"""Which replicas of a deployment run, as this process's Serve router last heard it: for a replica about its peers.

Imported by reference in a process whose deployment classes are copies: router and replica meet here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import Lock

Listener = Callable[[frozenset[str]], None]
"""Gets the ids of all that run now. Called from the router's loop; must not block or raise."""


class RunningReplicas:
    """The ids of the replicas of one deployment that take requests. Any thread."""

    def __init__(self) -> None:
        self.names: frozenset[str] = frozenset()
        self._lock = Lock()
        self._listeners: list[Listener] = []

    def listen(self, listener: Listener) -> None:
        """Call it now, and whenever a router hears of the replicas."""
        with self._lock:
            self._listeners.append(listener)
            listener(self.names)

    def heard(self, names: Iterable[str]) -> None:
        """Take in what a router was told."""
        with self._lock:
            self.names = frozenset(names)
            for listener in self._listeners:
                listener(self.names)
