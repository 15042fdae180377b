"""Calls side by side in forked processes, which find a large file's arrays in memory without a copy."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
Progress = Callable[[int], object]
"""Hears how much a call has done."""
ForkedCall = Callable[[Progress], T]

_LOOK_S = 0.3
_calls: Sequence[ForkedCall[Any]] = ()
_done: Any = None


def forked(calls: Sequence[ForkedCall[T]], told: Callable[[Sequence[int]], object], processes: int = 0) -> list[T]:
    """Return the results of all calls. ``told`` hears now and then how much each has done.

    ``processes``: at most; 0: as many as this process may use CPUs. One call alone runs here.
    """
    global _calls, _done
    count = min(processes or len(os.sched_getaffinity(0)), len(calls))
    done = [0] * len(calls)
    if count <= 1:
        results: list[T] = []
        for number, call in enumerate(calls):

            def tell(amount: int, number: int = number) -> None:
                done[number] = amount
                told(done)

            results.append(call(tell))
        return results
    context = multiprocessing.get_context("fork")
    shared = context.RawArray("q", len(calls))
    _calls, _done = calls, shared
    try:
        with concurrent.futures.ProcessPoolExecutor(count, context) as pool:
            running = [pool.submit(_run, number) for number in range(len(calls))]
            while concurrent.futures.wait(running, _LOOK_S).not_done:
                told(list(shared))
            told(list(shared))
            return [each.result() for each in running]
    finally:
        _calls, _done = (), None


def _run(number: int) -> Any:
    def tell(amount: int) -> None:
        _done[number] = amount

    return _calls[number](tell)
