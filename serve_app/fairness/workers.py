"""Threads for work that would block an event loop. Tenants take turns, so long texts of one do not delay others."""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import ParamSpec, TypeVar

from serve_app.fairness.shares import Budget, Shares
from serve_app.fairness.waiting_line import WaitingLine

P = ParamSpec("P")
T = TypeVar("T")

QUANTUM_BYTES = 16 << 10
"""Bytes of text per turn."""


class FairWorkers:
    """A few threads. With several tenants, no tenant can use all of them."""

    def __init__(self, shares: Shares, threads: int | None = None) -> None:
        threads = max(2, min(4, os.cpu_count() or 1)) if threads is None else threads
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="prepare")
        self._line = WaitingLine(Budget(shares, lambda: threads), QUANTUM_BYTES)

    async def run(self, tenant: str, cost_bytes: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``work`` in a thread at the tenant's turn and return its result. A cancelled caller does not stop it."""
        place = await self._line.enter(tenant, cost=cost_bytes)
        loop = asyncio.get_running_loop()

        def finished(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop is closed, so no caller needs the thread
                loop.call_soon_threadsafe(place.give_back)

        done = self._threads.submit(work, *args, **kwargs)
        done.add_done_callback(finished)
        return await asyncio.wrap_future(done)
