"""A process that dies at any call of the store leaves a batch that another one ends, and nothing behind."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from serve_app.batch import batches as batches_module
from serve_app.batch import lease
from serve_app.batch.batch_run import Said
from serve_app.batch.batches import Batches, StoredBatch, new_id
from serve_app.batch.files import Files
from serve_app.batch.worker import BatchWorker
from serve_app.fairness.queue import FairWorkers
from serve_app.fairness.shares import Shares
from serve_app.stored.database import StorageLimits
from serve_app.stored.objects import StoredObjects
from serve_app.stored.url import open_database

LINES = 3
ACME = "acme"


class Died(BaseException):
    """What a call of a process that was killed comes back with."""


class Mortal(StoredObjects):
    """A store whose process dies at its call number ``left``, counted from 0; below that it lives."""

    left = -1

    async def _run(self, tenant: str, work: Any) -> Any:
        if not self.left:
            raise Died
        self.left -= 1
        return await super()._run(tenant, work)


WORKERS = FairWorkers(Shares({}))


class Process:
    """One of several processes over a database, which dies at its call number ``left``."""

    def __init__(self, file: Path, left: int = -1, later_s: float = 0.0) -> None:
        bounds = StorageLimits(86_400, 1 << 20, lambda: time.time() + later_s)
        database = open_database(None, file, bounds)
        database._execute("PRAGMA synchronous = OFF")  # type: ignore[union-attr]  # no machine dies here
        self.objects = Mortal(database, b"s" * 32, WORKERS, bounds)
        self.objects.left = left
        self.batches = Batches(self.objects, Files(self.objects))

    async def create(self, *, anthropic: bool) -> StoredBatch:
        """Do what the ingress does for an upload and a batch of it, or for a message batch."""
        url = "/v1/messages" if anthropic else "/v1/completions"
        lines = "\n".join(json.dumps({"custom_id": f"c{at}", "url": url, "body": {}}) for at in range(LINES))

        async def parts() -> AsyncIterator[bytes]:
            yield lines.encode()

        content, size = await self.batches.files.write(ACME, parts(), 3600, await self.batches.room(ACME))
        if not anthropic:
            await self.batches.files.create(ACME, "in", content, size, "batch")
        now_s = self.objects.now_s()
        batch = StoredBatch(
            id=new_id("msgbatch_" if anthropic else "batch_"), endpoint=url, content=content, size=size,
            created_at=now_s, expires_at=now_s + 600, owns_content=anthropic, total=LINES if anthropic else 0,
        )  # fmt: skip
        await self.batches.create(ACME, batch)
        return batch

    async def run(self) -> None:
        """Run batches until all have ended and are tidied."""

        async def ask(*_: object) -> Said:
            return Said(200, b"{}")

        one = BatchWorker(self.batches, "runner", ask, bool, lambda *_: True, lambda: 2, lambda: 2)
        try:
            async with asyncio.timeout(60):
                while {queued.batch_id for queued in await self.batches.queue()} & {
                    batch.id for batch in await self.batches.listed(ACME, list)
                }:
                    await one._claim()
                    await asyncio.gather(*one.running.values())
                    await asyncio.sleep(0.005)
        finally:
            await one.stop()

    async def results(self, batch: StoredBatch) -> list[str]:
        """Return the custom_id of each result."""
        content, size = batch.results, batch.results_size
        if not batch.anthropic:
            file = await self.batches.files.get(ACME, batch.output_file_id or "")
            content, size = file.content, file.bytes
        text = b"".join([chunk async for chunk in self.batches.files.content(ACME, content, size)])
        return [json.loads(line)["custom_id"] for line in text.splitlines()]


@pytest.mark.parametrize("cancels", [False, True])
@pytest.mark.parametrize("anthropic", [False, True])
def test_a_process_that_dies_at_any_call_leaves_a_batch_whole_and_nothing_behind(
    anthropic: bool, cancels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it creates, runs, cancels, ends or tidies one: lines have one result each, and all room comes back."""
    monkeypatch.setattr(lease, "LEASE_S", 0.01)

    async def lived(process: Process) -> bool:
        try:
            batch = await process.create(anthropic=anthropic)
            if cancels:
                await process.batches.cancel(ACME, batch.id)
            await process.run()
        except Died:
            return False
        return True

    async def deleted(process: Process) -> bool:
        try:
            for batch in await process.batches.listed(ACME, list):
                await process.batches.delete(ACME, batch)
            for file in await process.batches.files.listed(ACME, list):
                await process.batches.files.delete(ACME, file.id)
        except Died:
            return False
        return True

    async def all_deaths() -> int:
        for left in range(1000):
            file = tmp_path / str(left)
            done = await lived(Process(file, left))
            other = Process(file)
            await other.run()
            for batch in await other.batches.listed(ACME, list):
                assert batch.status in ("completed", *(["cancelled"] if cancels else [])), left
                answered = (await other.results(batch)) if batch.completed or anthropic else []
                assert answered == [f"c{at}" for at in range(LINES if anthropic else batch.completed)]
                assert batch.status == "cancelled" or batch.completed == LINES
                assert await other.batches.done(ACME, batch) == set()
            while not await deleted(Process(file, left % 7 + 2)):  # dies here, too, until it gets through
                left += 1
            later = Process(file, later_s=batches_module.ABANDONED_S + 1)
            await later.run()
            await BatchWorker(
                later.batches, "late", lambda *_: asyncio.sleep(0), bool, lambda *_: True, lambda: 1, lambda: 1
            )._claim()
            await later.batches.sweep(ACME)
            assert (await later.objects.taken(ACME), await later.objects.taken("")) == (0, 0), left
            if done:
                return left
        return 1000

    assert 20 < asyncio.run(all_deaths()) < 1000
