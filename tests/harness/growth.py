"""Whether work grows faster than its input, told by CPU time: other work on the machine changes that little.

Only sizes are compared, and what looks wrong is measured again, so that no slow machine fails.
"""

import gc
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

FLOOR_S = 0.02
"""Below this, work is cheap, however it grows."""
MOST_GROWTH = 9.0
"""Of the cost, when the size is four times as large: 4 is linear, 16 is quadratic."""
AGAIN = 4
"""How often a cost that looks wrong is measured; the least counts."""
MOST_CPU_S = 2.0
"""Work that takes a hundred times the floor, at a size where the half was cheap, is not measured again."""


class _TooLongError(Exception):
    pass


def grows_too_fast(work: Callable[[int], object], most: int, least: int = 16) -> str:
    """Return what is wrong with the growth of ``work(size)``, "" for nothing.

    The size doubles from ``least`` to ``most``, or to where the work is no longer cheap. A main thread's function.
    """
    size = least
    while _cost(work, size) <= FLOOR_S and size < most:
        size = min(most, 2 * size)
    small = larger = float("inf")
    for _ in range(AGAIN):
        small, larger = min(small, _cost(work, size // 4)), min(larger, _cost(work, size))
        if larger <= max(FLOOR_S, MOST_GROWTH * small):
            return ""
        if larger >= MOST_CPU_S:
            break
    return f"{small * 1e3:.1f} ms at {size // 4}, {larger * 1e3:.1f} ms at {size}"


def _cost(work: Callable[[int], object], size: int) -> float:
    """Return CPU seconds."""
    gc.disable()  # it looks at more than this work has made
    try:
        with _ended():
            begun_s = time.thread_time()
            work(size)
            return time.thread_time() - begun_s
    except _TooLongError:
        return MOST_CPU_S
    finally:
        gc.enable()


@contextmanager
def _ended() -> Iterator[None]:
    """End what takes too much CPU time: something exponential would never end by itself."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise _TooLongError

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, MOST_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
