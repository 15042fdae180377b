"""``python -m tests.serve_app.stored.kills FILE KILLS``: writers of one file, killed at random moments.

In each round two processes store responses, delete some of their own, and report acknowledged changes. Both are
killed, and the reopened file is compared with the acknowledgements. Prints counts as JSON.
"""

import asyncio
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from secrets import token_hex

from serve_app.fairness.queue import FairWorkers
from serve_app.fairness.shares import Shares
from serve_app.stored.database import StorageLimits
from serve_app.stored.responses import Document, StoredResponses
from serve_app.stored.url import open_database

WRITERS = 2
TENANTS = ("acme", "globex")
LONG = random.Random(7).randbytes(300_000).hex()
"""Some responses take many pages of the file."""


def opened(file: Path) -> StoredResponses:
    bounds = StorageLimits(3600, 1 << 32)
    return StoredResponses(open_database(None, file, bounds), b"s" * 32, FairWorkers(Shares({})), bounds)


async def write(file: Path, said: int, rng: random.Random) -> None:
    """Store and delete until killed."""
    stored, own = opened(file), []
    while True:
        tenant, response_id = rng.choice(TENANTS), f"resp_{token_hex(16)}"
        text = LONG[: rng.choice((100, 3000, 600_000))]
        await stored.put(tenant, Document([], {"id": response_id, "created_at": time.time(), "text": text}))
        os.write(said, f"+ {tenant} {response_id} {len(text)}\n".encode())
        own.append((tenant, response_id))
        if rng.random() < 0.2:
            tenant, response_id = own.pop(rng.randrange(len(own)))
            os.write(said, f"? {tenant} {response_id} 0\n".encode())  # from now on it may or may not be deleted
            assert await stored.delete(tenant, response_id)
            os.write(said, f"- {tenant} {response_id} 0\n".encode())


def killed(file: Path, rng: random.Random) -> list[str]:
    """Return the changes acknowledged before the writers were killed."""
    reading, writing = os.pipe()
    pids = []
    for _ in range(WRITERS):
        seed = rng.random()
        pid = os.fork()
        if not pid:
            os.close(reading)
            asyncio.run(write(file, writing, random.Random(seed)))
        pids.append(pid)
    os.close(writing)
    said = b""
    for _ in range(rng.randrange(1, 5)):  # this many are acknowledged, and the next is being written
        said += os.read(reading, 1 << 16)
    time.sleep(rng.random() * 0.01)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    while part := os.read(reading, 1 << 16):
        said += part
    os.close(reading)
    return said.decode().splitlines()


async def compared(file: Path, there: dict[tuple[str, str], int], gone: set[tuple[str, str]]) -> int:
    """Return the number of acknowledged writes and deletions that are lost."""
    stored, lost = opened(file), 0
    for (tenant, response_id), length in there.items():
        found = await stored.get(tenant, response_id)
        lost += found is None or len(found[0].response["text"]) != length
    for tenant, response_id in gone:
        lost += await stored.get(tenant, response_id) is not None
    return lost


def main(file: Path, kills: int) -> dict[str, int]:
    rng = random.Random(2026)
    counts = dict.fromkeys(("kills", "stored", "deleted", "lost"), 0)
    for _ in range(kills // WRITERS):
        there: dict[tuple[str, str], int] = {}
        gone = set()
        for line in killed(file, rng):
            sign, tenant, response_id, length = line.split()
            if sign == "+":
                there[tenant, response_id] = int(length)
                counts["stored"] += 1
                continue
            there.pop((tenant, response_id), None)
            if sign == "-":
                gone.add((tenant, response_id))
        counts["kills"] += WRITERS
        counts["deleted"] += len(gone)
        counts["lost"] += asyncio.run(compared(file, there, gone))
    return counts


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))))
