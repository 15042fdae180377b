"""Prompts that a few clients send again and again, in random order."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random

from benchmarks.common.harness import progress
from serve_app.replay.client import TimedAnswer


@dataclass(slots=True)
class Repeats:
    """The answers to each prompt's first request, to its repeats, and the number of failed requests."""

    firsts: list[TimedAnswer] = field(default_factory=list)
    repeats: list[TimedAnswer] = field(default_factory=list)
    failed: int = 0


async def send_repeatedly(
    ask: Callable[[int, int], Awaitable[TimedAnswer]],
    *,
    prompts: int,
    rounds: int,
    clients: int,
    seed: int,
    name: str,
    failures: tuple[type[Exception], ...] = (),
) -> Repeats:
    """Send each of ``prompts`` ``rounds`` times. ``ask``: sends a request by its number and its prompt's number."""
    order = [prompt for prompt in range(prompts) for _ in range(rounds)]
    Random(seed).shuffle(order)
    turns = iter(progress(list(enumerate(order)), name))
    answered, seen = Repeats(), set[int]()

    async def work() -> None:
        for number, prompt in turns:
            answers = answered.repeats if prompt in seen else answered.firsts
            seen.add(prompt)
            try:
                answers.append(await ask(number, prompt))
            except failures:
                answered.failed += 1

    await asyncio.gather(*(work() for _ in range(clients)))
    return answered
