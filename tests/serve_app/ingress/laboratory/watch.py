"""What a request costs: CPU time of the process, and the longest stop of the event loop, both without the waiting.

CPU time, not time: other work on the machine changes it little. What looks wrong is measured again.
"""

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

MOST_STOP_S = 0.05
"""The loop may stand still for this long, on a core that adds up ``_slowness``'s numbers in ``SUM_S``."""
SUM_S = 0.006
FLOOR_S = 0.04
"""Below this a request is cheap, however it grows."""
MOST_GROWTH = 3.0
"""Of the cost, when the size doubles: 2 is linear, 4 is quadratic."""
LEAST_BYTES = 1024
CAREFUL_BYTES, MOST_CPU_S = 64 << 10, 2.0
"""For more than these, a quarter is tried first, and may cost so much."""
AGAIN = 3
"""How often a cost that looks wrong is measured; the least counts."""


@dataclass(slots=True)
class Cost:
    """``stop_s``: the longest turn of one callback in the loop, and whose."""

    cpu_s: float = 0.0
    stop_s: float = 0.0
    whose: str = ""

    def least(self, other: "Cost") -> "Cost":
        """Return the lesser one of each."""
        stopped = min(self, other, key=lambda cost: cost.stop_s)
        return Cost(min(self.cpu_s, other.cpu_s), stopped.stop_s, stopped.whose)


@contextmanager
def watched() -> Iterator[Cost]:
    """Measure what runs in this process and its loop."""
    cost, run = Cost(), asyncio.events.Handle._run

    def timed(handle: Any) -> None:
        begun_s = time.thread_time()
        run(handle)
        if (stop_s := time.thread_time() - begun_s) > cost.stop_s:
            cost.stop_s, cost.whose = stop_s, repr(handle._callback)[:200]

    gc.disable()
    try:
        with patch.object(asyncio.events.Handle, "_run", timed):
            begun_s = time.process_time()
            yield cost
            cost.cpu_s = time.process_time() - begun_s
    finally:
        gc.enable()


Work = Callable[[int], Awaitable[object]]


async def _measured(work: Work, size: int) -> Cost:
    with watched() as cost:
        # Its first turn would belong to the turn that is measured from outside.
        await asyncio.create_task(_run(work, size))
    return cost


async def _run(work: Work, size: int) -> None:
    await asyncio.sleep(0)
    await work(size)


async def _least(work: Work, size: int, first: Cost) -> Cost:
    for _ in range(AGAIN - 1):
        first = first.least(await _measured(work, size))
    return first


async def wrong_with(work: Work, most_bytes: int, whole_bytes: int = 0) -> str:
    """Return what is wrong with the growth of ``work(size)`` over two doublings up to a size, "" for nothing.

    ``whole_bytes``: the largest size there is; what stops the loop for as long by then is tried there too.
    """
    quarter_bytes = most_bytes // 4
    if most_bytes > CAREFUL_BYTES and (cost := await _measured(work, quarter_bytes)).cpu_s > MOST_CPU_S:
        return f"{cost.cpu_s:.1f} s at {quarter_bytes} bytes"
    most = await _measured(work, most_bytes)
    if most.stop_s > MOST_STOP_S and (stopped := _stopped(await _least(work, most_bytes, most), most_bytes)):
        return stopped
    if most.cpu_s > FLOOR_S:
        base = await _measured(work, LEAST_BYTES)
        quarter = await _measured(work, quarter_bytes)
        if _grows(base, quarter, most):
            base = await _least(work, LEAST_BYTES, base)  # one that was dear hides what the quarter costs
            quarter, most = await _least(work, quarter_bytes, quarter), await _least(work, most_bytes, most)
        if _grows(base, quarter, most):
            told = ((base, LEAST_BYTES), (quarter, quarter_bytes), (most, most_bytes))
            return ", ".join(f"{cost.cpu_s * 1e3:.0f} ms at {size}" for cost, size in told) + " bytes"
    if most.stop_s * whole_bytes / most_bytes > MOST_STOP_S:
        return _stopped(await _least(work, whole_bytes, await _measured(work, whole_bytes)), whole_bytes)
    return ""


def _grows(base: Cost, quarter: Cost, most: Cost) -> bool:
    """Return whether what comes on top of the base grows faster than it may."""
    grown = most.cpu_s - base.cpu_s
    return grown > FLOOR_S and grown > MOST_GROWTH**2 * (quarter.cpu_s - base.cpu_s)


def _stopped(cost: Cost, size: int) -> str:
    if cost.stop_s <= MOST_STOP_S * _slowness():
        return ""
    return f"the loop stands still for {cost.stop_s * 1e3:.0f} ms at {size} bytes, in {cost.whose}"


def _slowness() -> float:
    """Return how much slower this core is now than another one, at least 1: others use its caches and units, too."""
    begun_s = time.thread_time()
    sum(number * number for number in range(200_000))
    return max(1.0, (time.thread_time() - begun_s) / SUM_S)
