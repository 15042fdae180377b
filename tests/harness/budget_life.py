"""One life of an ingress' budgets in a process of its own, with clients that ask until none is let in.

Arguments: the database's file, a file for its answers' tokens (written as they are sent), and the number of clients.
"""

import asyncio
import os
import random
import sys
from pathlib import Path

from serve_app.errors import BudgetSpent
from serve_app.usage import Counts
from tests.serve_app.test_budgets import KEY, asking, ingress, tenant

BUDGET, PROMPT, ANSWER = 100_000, 40, 10
"""Tokens."""


async def live(file: Path, journal: Path, clients: int) -> None:
    """Answer every request that the budget allows, and write what is left to write at the end."""
    config, rng = tenant(tokens=BUDGET, period="day"), random.Random(1)
    budgets = ingress(file, config)
    budgets.start()
    sent = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)  # what is written survives this process

    def count(counts: Counts) -> None:
        os.write(sent, f"{counts.prompt_tokens + counts.output_tokens}\n".encode())
        budgets.count(KEY, counts)

    async def client() -> None:
        while True:
            try:
                await budgets.check(asking(config), ())
            except BudgetSpent:
                return
            count(Counts(prompt_tokens=PROMPT))
            await asyncio.sleep(rng.random() * 0.4)
            count(Counts(requests=1, output_tokens=ANSWER))

    await asyncio.gather(*(client() for _ in range(clients)))
    await budgets.flush()


if __name__ == "__main__":
    asyncio.run(live(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
