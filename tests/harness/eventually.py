"""Waiting until something holds that nothing announces: other processes, threads and tasks decide when."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from inspect import isawaitable

WITHIN_S = 120.0


def eventually(
    holds: Callable[[], object],
    within_s: float = WITHIN_S,
    *,
    failures: tuple[type[Exception], ...] = (),
    every_s: float = 0.01,
) -> None:
    """Wait until ``holds``. ``failures``: those of a condition that cannot be evaluated yet, which does not hold."""
    deadline_s, seen = time.monotonic() + within_s, Counter[str]()
    while True:
        try:
            if holds():
                return
            seen["it does not hold"] += 1
        except failures as error:
            seen[repr(error)] += 1
        assert time.monotonic() < deadline_s, f"it did not happen in {within_s:g} s: {seen.most_common()}"
        time.sleep(every_s)


async def until(
    holds: Callable[[], object | Awaitable[object]], within_s: float = WITHIN_S, *, every_s: float = 0.01
) -> None:
    """Wait until ``holds``, which may be asynchronous, while other tasks run."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + within_s
    while True:
        result = holds()
        if await result if isawaitable(result) else result:
            return
        assert loop.time() < deadline_s, f"it did not happen in {within_s:g} s"
        await asyncio.sleep(every_s)


async def let_others_run(count: int = 1) -> None:
    """Let every other task take so many turns."""
    for _ in range(count):
        await asyncio.sleep(0)
