"""``python -m tests.serve_app.batch.kills FILE KILLS [URL]``: runners of batches, killed at random moments.

Two processes run the batches of one database. In each round one or both are killed, and started again. At the end
each line's result is looked for in the files. Prints counts as JSON.
"""

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from serve_app.batch import batch_run, lease, worker
from serve_app.batch.batch_run import Said
from serve_app.batch.batches import Batches, StoredBatch, new_id
from serve_app.batch.files import Files
from serve_app.batch.worker import BatchWorker
from serve_app.fairness.queue import FairWorkers
from serve_app.fairness.shares import Shares
from serve_app.stored.database import StorageLimits
from serve_app.stored.objects import StoredObjects
from serve_app.stored.url import open_database

RUNNERS = 2
LINES = 400
TENANTS = ("acme", "globex")


def opened(file: Path, url: str | None) -> Batches:
    bounds = StorageLimits(3600, 1 << 32)
    objects = StoredObjects(open_database(url, file, bounds), b"s" * 32, FairWorkers(Shares({})), bounds)
    return Batches(objects, Files(objects))


async def run(batches: Batches) -> None:
    """Run batches until killed; the answer to a line tells which try it was."""
    rng = random.Random()

    async def ask(tenant: str, path: str, body: bytes, request_id: str, waits: bool) -> Said:
        await asyncio.sleep(rng.random() * 0.02)
        text = json.loads(body)["prompt"]
        bad = text.endswith("7")
        answer = {"tenant": tenant, "prompt": text, "id": request_id, "usage": {"prompt_tokens": 1}}
        return Said(400 if bad else 200, json.dumps(answer).encode())

    one = BatchWorker(batches, "runner", ask, lambda _: True, lambda *_: True, lambda: 8, lambda: 2)
    one.start()
    await asyncio.Event().wait()


def started(file: Path, url: str | None) -> int:
    if not (pid := os.fork()):
        asyncio.run(run(opened(file, url)))
    return pid


async def submitted(file: Path, url: str | None, tenants: Sequence[str] = TENANTS) -> dict[str, str]:
    """Queue a batch for each tenant; return the tenants by id."""
    batches, made = opened(file, url), {}
    for tenant in tenants:
        lines = [
            {"custom_id": f"c{at}", "url": "/v1/completions", "body": {"prompt": f"{tenant} {at}"}}
            for at in range(LINES)
        ]

        async def parts(text: bytes = "\n".join(map(json.dumps, lines)).encode()) -> AsyncIterator[bytes]:
            yield text

        content, size = await batches.files.write(tenant, parts(), 3600)
        now_s = time.time()
        batch = StoredBatch(
            id=new_id("batch_"), endpoint="/v1/completions", content=content, size=size, created_at=now_s,
            expires_at=now_s + 3600,
        )  # fmt: skip
        await batches.create(tenant, batch)
        made[batch.id] = tenant
    return made


async def ended(file: Path, url: str | None) -> bool:
    """Return whether all batches have ended, and what they no longer need is removed."""
    return not await opened(file, url).queue()


async def judged(file: Path, url: str | None, made: dict[str, str], counts: Counter[str]) -> None:
    """Count lines without a result, with several, and with another's; and what is left in the database."""
    batches = opened(file, url)
    for batch_id, tenant in made.items():
        batch = await batches.get(tenant, batch_id)
        counts["unended"] += batch.status != "completed"
        found: Counter[str] = Counter()
        for file_id, bad in ((batch.output_file_id, False), (batch.error_file_id, True)):
            one = await batches.files.get(tenant, file_id or "")
            text = b"".join([chunk async for chunk in batches.files.content(tenant, one.content, one.bytes)])
            for line in text.splitlines():
                told = json.loads(line)
                body = told["response"]["body"]
                found[told["custom_id"]] += 1
                counts["wrong"] += body["prompt"] != f"{tenant} {told['custom_id'][1:]}"
                counts["wrong"] += bad != body["prompt"].endswith("7")
        counts["results"] += found.total()
        counts["lost"] += LINES - len(found)
        counts["repeated"] += found.total() - len(found)
        counts["wrong"] += (batch.completed, batch.failed, batch.total) != (LINES * 9 // 10, LINES // 10, LINES)
        counts["left"] += len(await batches.done(tenant, batch))
    counts["left"] += len(await batches.queue())


def main(file: Path, kills: int, url: str | None = None) -> dict[str, int]:
    lease.LEASE_S, lease.TICK_S, batch_run.TICK_S, worker.POLL_S = 0.4, 0.1, 0.1, 0.05
    rng = random.Random(2026)
    counts: Counter[str] = Counter(kills=0, batches=0, results=0, lost=0, repeated=0, wrong=0, left=0, unended=0)
    pids = [started(file, url) for _ in range(RUNNERS)]
    while counts["kills"] < kills:
        made = asyncio.run(submitted(file, url))
        counts["batches"] += len(made)
        deadline_s = time.monotonic() + 120
        while not asyncio.run(ended(file, url)) and time.monotonic() < deadline_s:
            time.sleep(rng.random() * 0.3)
            for at in rng.choice(((0,), (1,), (0, 1))) if counts["kills"] < kills else ():
                os.kill(pids[at], signal.SIGKILL)
                os.waitpid(pids[at], 0)
                pids[at] = started(file, url)
                counts["kills"] += 1
        asyncio.run(judged(file, url, made, counts))
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return dict(counts)


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])))
