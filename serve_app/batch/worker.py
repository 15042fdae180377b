"""Runs queued batches, in the order that computes least, as work that waits for all other.

One process at a time runs a batch, by its lease. A line's request goes through ``ask``, the same path as a client's.
Knows neither HTTP nor engines.
"""

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from router.background import run_in_background
from serve_app.batch.batch_run import BatchHost, BatchRun
from serve_app.batch.lease import Lease, Lost
from serve_app.batch.turns import Turns
from serve_app.errors import WarmpathError

logger = logging.getLogger(__name__)

MAX_RUNNING = 16
"""Batches that one ingress runs at once, at most one of a tenant."""
POLL_S = 2.0


@dataclass(eq=False)
class BatchWorker(BatchHost):
    """One ingress' runner of batches."""

    running: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """By id of the batch."""
    clock: Callable[[], float] = time.monotonic
    _runs: dict[str, BatchRun] = field(default_factory=dict)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _loop: asyncio.Task[None] | None = None
    _leaving: set[asyncio.Task[None]] = field(default_factory=set)
    """What lets go of batches; a stop waits for it and does not cancel it."""

    def __post_init__(self) -> None:
        self.name = f"{self.name} {secrets.token_hex(4)}"
        self.turns = Turns(self.clock)

    @property
    def asking(self) -> Counter[str]:
        """The lines in progress by model, as they name it."""
        return sum((run.asking for run in self._runs.values()), Counter[str]())

    def start(self) -> None:
        """Begin to look for batches."""
        self._loop = run_in_background(self._watch)

    async def stop(self) -> None:
        """Let go of all batches; other ingresses continue them at once."""
        tasks = [*self.running.values(), *([self._loop] if self._loop is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._leaving:
            await asyncio.wait(self._leaving)

    def wake(self) -> None:
        """Look at once: there is a new batch, or one was cancelled."""
        self._news.set()

    def limits_changed(self) -> None:
        """Ask again for what rests, as its tenant's limits refused it."""
        self.turns.refresh()
        self._news.set()

    async def _watch(self) -> None:
        while True:
            try:
                await self._claim()
            except WarmpathError:
                logger.warning("batches cannot be looked up", exc_info=True)
            try:
                async with asyncio.timeout(POLL_S):
                    await self._news.wait()
                self._news.clear()
            except TimeoutError:
                pass

    async def _claim(self) -> None:
        """Begin or continue queued batches, one of each tenant at a time. An error costs the batch that had it."""
        for queued in self.turns.order(await self.batches.queue()):
            tenant, batch_id = queued.tenant, queued.batch_id
            if len(placed := self._placed()) >= MAX_RUNNING and not any(
                self.turns.is_over(one.begun_s) for one in placed
            ):
                return
            if batch_id in self.running or not self.knows(tenant) or self.turns.rests(batch_id):
                continue
            ending = self.turns.rests(tenant) or any(run.tenant == tenant for run in self._runs.values())
            try:
                if (lease := await Lease.take(self.batches, self.name, queued, ending=ending)) is None:
                    continue
                if len(placed := self._placed()) >= MAX_RUNNING:
                    self.leave(min(placed, key=lambda one: one.begun_s))
                self._runs[batch_id] = run = BatchRun(self, lease, self.clock())
                self.running[batch_id] = asyncio.create_task(self._run(run))
            except Exception as error:
                self._failed(batch_id, error)

    def share(self) -> int:
        """Return how many lines of a batch may be in progress: of all, its part."""
        return max(1, self.at_once() // max(1, len(self._placed())))

    def _placed(self) -> list[BatchRun]:
        """Return the batches that have a place."""
        return [run for run in self._runs.values() if not run.leaving.is_set()]

    def leave(self, run: BatchRun) -> None:
        """Let a batch give its place back."""
        if not run.leaving.is_set():
            run.leaving.set()
            self.turns.ended(run.tenant)
            self._news.set()

    def _failed(self, batch_id: str, error: BaseException) -> None:
        self.turns.failed(batch_id)
        expected = isinstance(error, WarmpathError)
        logger.warning(
            "batch %s stops here and is continued later: %s", batch_id, error, exc_info=None if expected else error
        )

    async def _run(self, run: BatchRun) -> None:
        batch_id = run.lease.batch.id
        work = asyncio.create_task(run.work())
        try:
            ticks = asyncio.create_task(run.lease.keep())
            await asyncio.wait((work, ticks), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()
            ticks.cancel()
            await asyncio.gather(work, ticks, return_exceptions=True)
            errors = [error for task in (work, ticks) if not task.cancelled() and (error := task.exception())]
            for error in errors:
                if not isinstance(error, Lost):
                    self._failed(batch_id, error)
            if not errors:
                self.turns.worked(batch_id)
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            leaving = asyncio.create_task(self._let_go(run))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)

    async def _let_go(self, run: BatchRun) -> None:
        try:
            await run.lease.let_go()
        finally:
            self.leave(run)
            del self.running[run.lease.batch.id], self._runs[run.lease.batch.id]
