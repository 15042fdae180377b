"""One life of an ingress' budgets in a process of its own, with clients that ask until none is let in.

Arguments: the database's file, a file for its answers' tokens (written as they are sent), the number of clients, and
the time that is noon.
"""

import asyncio
import os
import random
import sys
import time
from pathlib import Path

from serve_app.errors import BudgetSpent, RateLimited
from serve_app.usage import Counts
from tests.serve_app.test_budgets import KEY, NOON_S, asking, ingress, tenant

BUDGET, PROMPT, ANSWER = 100_000, 40, 10
"""Tokens."""


async def live(file: Path, journal: Path, clients: int, noon_s: float) -> None:
    """Answer every request that the budget allows, and write what is left to write at the end."""
    config, rng = tenant(tokens=BUDGET, period="day"), random.Random(1)
    budgets = ingress(file, config, of=4, now_s=lambda: NOON_S + time.time() - noon_s)
    budgets.start()
    sent = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)  # what is written survives this process

    def count(counts: Counts) -> None:
        os.write(sent, f"{counts.prompt_tokens + counts.output_tokens}\n".encode())
        budgets.count(KEY, counts)

    async def client() -> None:
        while True:
            allowance = asking(config, PROMPT, ANSWER)
            try:
                await budgets.check(allowance, ())
            except BudgetSpent:
                return
            except RateLimited:  # others under way may use the rest, or one that died, until what it held lapses
                await asyncio.sleep(0.2)
                continue
            count(Counts(prompt_tokens=PROMPT))
            await asyncio.sleep(rng.random() * 0.4)
            count(Counts(requests=1, output_tokens=ANSWER))
            allowance.end()

    await asyncio.gather(*(client() for _ in range(clients)))
    await budgets.flush()


if __name__ == "__main__":
    asyncio.run(live(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))
