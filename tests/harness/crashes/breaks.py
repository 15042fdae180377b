"""Rounds of questions whose calls break, many at once, each answer compared with the undisturbed one."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from tests.harness.crashes.calls import MOST_BREAKS, CallCrashes
from tests.harness.crashes.questions import MOST_TOKENS, Questions
from tests.harness.crashes.tally import Broken, Tally

AT_ONCE = 16


async def break_calls(
    crashes: CallCrashes, questions: Questions, rng: random.Random, breaks: int
) -> dict[str, dict[str, Any]]:
    """Ask questions alone, then many at once, then many at once with breaks, until so many calls have broken."""
    undisturbed, disturbed = Tally(), Tally()
    before = crashes.replicas.broken
    while crashes.replicas.broken - before < breaks:
        asked = []
        for number in range(AT_ONCE):
            question = questions.draw()
            prepared = await crashes.prepare(question)
            expected = await crashes.answer(*prepared)
            if number % 2 and not isinstance(expected, Broken):
                question = questions.with_stops(question, expected)
                # A seed that was not given is drawn once: what is compared has the same.
                prepared = (await crashes.prepare(question))[0], prepared[1]
                expected = await crashes.answer(*prepared)
            if isinstance(expected, Broken):
                raise expected
            asked.append((question, prepared, expected))
        for tally, plans in ((undisturbed, False), (disturbed, True)):
            answers = [
                crashes.answer(*prepared, break_points(rng, len(prepared[1])) if plans else ())
                for _, prepared, _ in asked
            ]
            for (question, _, expected), got in zip(asked, await asyncio.gather(*answers), strict=True):
                tally.add(question, expected, got)
    return {"undisturbed_under_load": undisturbed.results(), "with_breaks": disturbed.results()}


def break_points(rng: random.Random, choices: int) -> list[list[int]]:
    """Return, for each choice, after how many tokens its calls break, one after the other."""
    return [[rng.randrange(MOST_TOKENS // 2) for _ in range(rng.randrange(MOST_BREAKS + 1))] for _ in range(choices)]
