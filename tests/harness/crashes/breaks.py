"""Rounds of questions whose calls break, many at once, each answer beside the undisturbed one."""

from __future__ import annotations

import asyncio
import random

from tests.harness.crashes.calls import MOST_BREAKS, CallCrashes
from tests.harness.crashes.questions import MOST_TOKENS, Broken, Questions, Reply

AT_ONCE = 16


Answers = tuple[Reply | Broken, Reply | Broken, Reply | Broken]
"""To one question: alone, beside others, and beside others with breaks."""


async def break_calls(crashes: CallCrashes, questions: Questions, rng: random.Random, breaks: int) -> list[Answers]:
    """Ask questions alone, then many at once, then many at once with breaks, until so many calls have broken."""
    compared: list[Answers] = []
    before = crashes.replicas.broken
    while crashes.replicas.broken - before < breaks:
        asked = []
        for number in range(AT_ONCE):
            question = questions.draw()
            prepared = await crashes.prepare(question)
            alone = await crashes.answer(*prepared)
            if number % 2 and isinstance(alone, Reply):
                question = questions.with_stops(question, alone)
                # A seed that was not given is drawn once: what is compared has the same.
                prepared = (await crashes.prepare(question))[0], prepared[1]
                alone = await crashes.answer(*prepared)
            asked.append((prepared, alone))
        loaded = await asyncio.gather(*(crashes.answer(*prepared) for prepared, _ in asked))
        breaking = (crashes.answer(*prepared, break_points(rng, len(prepared[1]))) for prepared, _ in asked)
        broken = await asyncio.gather(*breaking)
        compared.extend(zip((alone for _, alone in asked), loaded, broken, strict=True))
    return compared


def break_points(rng: random.Random, choices: int) -> list[list[int]]:
    """Return, for each choice, after how many tokens its calls break, one after the other."""
    return [[rng.randrange(MOST_TOKENS // 2) for _ in range(rng.randrange(MOST_BREAKS + 1))] for _ in range(choices)]
