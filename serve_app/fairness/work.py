"""Work for a client's input in threads: counted in steps, and given up once its client has left."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class TooMuchWorkError(Exception):
    """An input needs more steps than it may take."""


class AbandonedError(Exception):
    """Nobody waits for this thread's work any more, so that nobody sees this error."""


class ThreadJob:
    """One call in a thread of ``FairWorkers``; ``abandoned``: its caller has left."""

    __slots__ = ("abandoned",)

    def __init__(self) -> None:
        self.abandoned = False


class _Current(threading.local):
    job: ThreadJob | None = None


_current = _Current()


def set_job(job: ThreadJob | None) -> None:
    """Set what this thread works on, None: nothing."""
    _current.job = job


def check_wanted() -> None:
    """Raise AbandonedError if the caller of this thread's job has left; a long job asks now and then."""
    job = _current.job
    if job is not None and job.abandoned:
        raise AbandonedError


class StepBudget:
    """The steps that one input may still take, each some microseconds."""

    __slots__ = ("left",)

    def __init__(self, most: int) -> None:
        self.left = most

    def take(self, steps: int = 1) -> None:
        """Count steps. Raises TooMuchWorkError for more than there may be, AbandonedError once the caller has left."""
        self.left -= steps
        if self.left < 0:
            raise TooMuchWorkError
        check_wanted()


class TenantsLru(Generic[K, V]):
    """The latest values by tenant and key, ``most`` in all (any thread).

    A tenant with many loses its own least recently used, so that it cannot push out what others have.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._count = 0
        self._values: dict[str, OrderedDict[K, V]] = {}

    def __len__(self) -> int:
        """Return the number of values."""
        return self._count

    def get(self, tenant: str, key: K) -> V | None:
        """Return a value, None if it is not kept."""
        with self._lock:
            own = self._values.get(tenant)
            if own is None or key not in own:
                return None
            own.move_to_end(key)
            return own[key]

    def put(self, tenant: str, key: K, value: V) -> None:
        """Keep a value; the tenant that has most loses one if there are too many."""
        with self._lock:
            own = self._values.setdefault(tenant, OrderedDict())
            self._count += key not in own
            own[key] = value
            own.move_to_end(key)
            if self._count > self._most:
                loser = max(self._values, key=lambda one: len(self._values[one]))
                self._values[loser].popitem(last=False)
                self._count -= 1
                if not self._values[loser]:
                    del self._values[loser]
