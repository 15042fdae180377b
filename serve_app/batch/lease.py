"""A batch's row names who runs it, and for how long: the lease of one process, which keeps it and lets go of it."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from serve_app.batch.batches import Batches, QueuedBatch, StoredBatch
from serve_app.errors import NotFound, Overloaded, WarmpathError

logger = logging.getLogger(__name__)

T = TypeVar("T")

LEASE_S = 20.0
"""After this time without a sign of its runner, another ingress continues a batch."""
TICK_S = 1.0
"""The interval at which a running batch's row is written and read."""


class Lost(Exception):
    """Another process runs the batch, or it was deleted."""


@dataclass(eq=False)
class Lease:
    """A batch that this process, ``name``, runs, as of the last look at its row."""

    batches: Batches
    name: str
    tenant: str
    batch: StoredBatch
    counts: Counter[str] = field(default_factory=Counter)
    """New results that the row does not count yet."""
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @classmethod
    async def take(cls, batches: Batches, name: str, queued: QueuedBatch, *, ending: bool) -> "Lease | None":
        """Become the holder of a batch; None if another one is, or there is nothing to do.

        ``ending``: only if no line of it will be asked for.
        """
        now_s = batches.objects.now_s()

        def is_free(batch: StoredBatch) -> bool:
            left_s = batch.held_until_s - batches.objects.now_s()
            # A longer lease than there are was written before the clock was set back.
            return not 0 < left_s <= 2 * LEASE_S or batch.holder == name

        def hold(batch: StoredBatch) -> bool:
            free = is_free(batch)
            batch.holder, batch.held_until_s = name, now_s + LEASE_S
            return free and not batch.ended

        try:
            batch = await batches.get(queued.tenant, queued.batch_id)
        except NotFound:
            await batches.unqueue(queued)
            return None
        if batch.ended:  # its runner ended before the rest was tidied
            await batches.tidy(queued.tenant, batch)
            return None
        if not is_free(batch) or (ending and batch.status != "cancelling" and now_s < batch.expires_at):
            return None
        row = await batches.change(queued.tenant, queued.batch_id, hold)
        return None if row is None else cls(batches, name, queued.tenant, row)

    async def write(self, change: Callable[[StoredBatch], None] = lambda _: None) -> None:
        """Change the row and take over what it says. Raises Lost if another process holds it."""
        now_s = self.batches.objects.now_s()

        def write(batch: StoredBatch) -> bool:
            if batch.holder != self.name or batch.ended:
                return False
            batch.held_until_s = now_s + LEASE_S
            batch.completed += counts["completed"]
            batch.failed += counts["failed"]
            change(batch)
            return True

        async with self._writing:
            counts = Counter(self.counts)
            row = await self.batches.change(self.tenant, self.batch.id, write)
            if row is None:
                raise Lost
            self.counts.subtract(counts)
            self.batch = row

    async def keep(self) -> None:
        """Keep the lease and write the counts. Return once the batch is another's, or the store is gone for long."""
        while True:
            await asyncio.sleep(TICK_S)
            try:
                await self.write()
            except Lost:
                return
            except WarmpathError:
                if self.batches.objects.now_s() > self.batch.held_until_s:
                    return

    async def let_go(self) -> None:
        """Let another process run what is left of the batch."""
        ended = True  # or deleted: then there is no row

        def free(batch: StoredBatch) -> bool:
            nonlocal ended
            ended = batch.ended
            if batch.holder != self.name or batch.ended:
                return False
            batch.holder, batch.held_until_s = "", 0.0
            return True

        try:
            await self.batches.change(self.tenant, self.batch.id, free)
            if ended and not self.batch.ended:  # after a pause here, by another: a line may have come too late for it
                await self.batches.tidy(self.tenant, self.batch)
        except WarmpathError:
            logger.warning("batch %s is free once its lease ends", self.batch.id)


async def patient(work: Callable[[], Awaitable[T]]) -> T:
    """Do what needs the store, again while it cannot be reached: a run ends with its lease at the latest."""
    while True:
        try:
            return await work()
        except Overloaded:
            await asyncio.sleep(TICK_S)
