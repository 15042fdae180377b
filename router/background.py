"""The one owner of loops that live as long as their process: feeds, listeners, followers, sweepers, writers.

A loop that fails, or ends, is logged, counted by name, begun anew, and told by ``/health`` and a metric until it has
run a minute without another failure. The error of one item is the loop's own matter: it costs that item alone.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

from router.protocol.samples import Sample

logger = logging.getLogger(__name__)

PAUSE_S = 1.0
"""The time between a failure and the next beginning."""
RECOVERY_S = 60.0
"""A loop that has not failed for this long is well again."""

FAILURES, FAILING = "warmpath_background_failures_total", "warmpath_background_failing"

Looping = Callable[[], Coroutine[Any, Any, None]]


@dataclass(slots=True)
class _Loop:
    failures: int = 0
    failed_s: float = float("-inf")
    error: str = ""


class BackgroundLoops:
    """The loops of one process, by name, and how often each failed. Threads may tell of failures, too."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._loops: dict[str, _Loop] = {}
        self._lock = threading.Lock()

    def begin(self, name: str) -> None:
        """Know a loop, so that its count is 0 before its first failure."""
        with self._lock:
            self._loops.setdefault(name, _Loop())

    def failed(self, name: str, error: str) -> None:
        """Count a failure of a loop, which its owner begins anew. ``error``: its kind, without anybody's text."""
        with self._lock:
            loop = self._loops.setdefault(name, _Loop())
            loop.failures += 1
            loop.failed_s, loop.error = self._clock(), error

    def failing(self) -> dict[str, str]:
        """Return the loops that failed within ``RECOVERY_S``, and their last errors."""
        since_s = self._clock() - RECOVERY_S
        with self._lock:
            return {name: loop.error for name, loop in self._loops.items() if loop.failed_s > since_s}

    def samples(self) -> Iterator[Sample]:
        """Yield the failures of each loop, and whether it is failing."""
        failing = self.failing()
        with self._lock:
            counts = [(name, loop.failures) for name, loop in sorted(self._loops.items())]
        for name, failures in counts:
            yield FAILURES, (("loop", name),), float(failures)
            yield FAILING, (("loop", name),), float(name in failing)

    async def keep_running(self, work: Looping, pause_s: float | None = None, *, ends: bool = False) -> None:
        """Run ``work`` until this task is cancelled, again after every failure. ``ends``: or until it returns."""
        name = name_of(work)
        self.begin(name)
        while True:
            try:
                await work()
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                logger.exception("a part of %s was cancelled; it begins anew", name)
                self.failed(name, "CancelledError")
            except Exception as error:
                logger.exception("%s failed; it begins anew", name)
                self.failed(name, type(error).__name__)
            else:
                if ends:
                    return
                logger.error("%s ended; it begins anew", name)
                self.failed(name, "it ended")
            await asyncio.sleep(PAUSE_S if pause_s is None else pause_s)


LOOPS = BackgroundLoops()
"""Those of this process."""


def run_in_background(work: Looping) -> asyncio.Task[None]:
    """Start a loop that lives as long as its owner; keep the task, and cancel it at the end."""
    return asyncio.get_running_loop().create_task(LOOPS.keep_running(work))


def run_until_done(work: Looping) -> asyncio.Task[None]:
    """Start work that is begun anew after every error, until it returns; keep the task."""
    return asyncio.get_running_loop().create_task(LOOPS.keep_running(work, ends=True))


def name_of(work: Callable[..., Any]) -> str:
    """Return the name under which a loop is logged and counted: that of its function."""
    return getattr(getattr(work, "func", work), "__qualname__", repr(work))
