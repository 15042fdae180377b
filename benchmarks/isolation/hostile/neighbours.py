"""Nine polite tenants, first among themselves, then beside one who attacks in every way in turn.

Each has three system prompts of its own, as an app has: what attacks could take from them is their cached prefixes.
Their questions come at random and take half of what the replicas can compute, so that they wait for each other without
an attack, too: beside an idle machine whoever shares it fairly is twice as slow.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from benchmarks.common.prompts import WORDS
from benchmarks.isolation.hostile.attacker import Attacker
from benchmarks.isolation.hostile.bodies import KINDS
from benchmarks.isolation.hostile.stage import POLITE, Stage
from benchmarks.isolation.hostile.verdicts import (
    all_served,
    at_least,
    at_most,
    hit_rate,
    paired,
    ratio,
    ttft_percentile,
    verdict,
)
from benchmarks.isolation.hostile.watch import Ask, Seen, Watched

HIT_RATE, TTFT = 0.98, 1.5
SYSTEM_PROMPTS, SYSTEM_WORDS = 3, 500
EVERY_S = 2.5
PARTS_WITHOUT = 3
LOAD = 0.5
"""What the nine take of the replicas' prefill."""
TOKENS_A_WORD = 1.35
"""With the demo model's tokenizer."""

KINDS_IN_TURN: tuple[tuple[str, dict[str, Any]], ...] = (
    ("retry_storm", {}),
    *(("big_bodies", {"kind": kind, "for_ever": True}) for kind in KINDS),
    ("long_references", {}),
    ("half_open", {}),
    ("leavers", {"for_ever": True}),
)


async def neighbours(stage: Stage, minutes: float) -> dict[str, Any]:
    """Measure the nine beside each attack for an equal part of ``minutes``, before that as long three times without.

    Their questions come at the same moments in every part: in another minute, chance alone makes p99 another.
    """
    part_s = minutes * 60 / len(KINDS_IN_TURN)
    words = await _question_words(stage)
    await _all(stage, words, 2 * SYSTEM_PROMPTS * EVERY_S, 0)
    # At rest the rate is that of a warm-up, without decodes beside it: half of that is more than half of what they can.
    words = await _question_words(stage)
    without: list[Seen] = []
    for number in range(PARTS_WITHOUT):
        without += all_served(await _all(stage, words, part_s, (number + 1) * 10_000))
    beside: list[Seen] = []
    attacks: dict[str, Any] = {}
    ended_s = 0.0
    for number, (name, options) in enumerate(KINDS_IN_TURN):
        async with Attacker(name, stage.target(), **options) as attacker:
            seen = await _all(stage, words, part_s, (number + 1 + PARTS_WITHOUT) * 10_000)
        beside += seen
        outcome = attacker.outcome
        ended_s = outcome.ended_s
        attacks[" ".join([name, str(options.get("kind", ""))]).strip()] = {
            **paired(without, seen),
            "hit_rate_ratio": ratio(hit_rate(seen), hit_rate(without)),
            "attacker_statuses": outcome.statuses(),
            "attacker_notes": outcome.notes,
        }
    hits = ratio(hit_rate(beside), hit_rate(without))
    slower = ratio(ttft_percentile(beside, 99), ttft_percentile(without, 99))
    figures = {
        **paired(without, beside),
        "question_words": words,
        "hit_rate": {"without": hit_rate(without), "beside": hit_rate(beside)},
        "hit_rate_ratio": hits,
        "attacks": attacks,
        **await stage.left(ended_s),
    }
    bars = [
        at_least(f"the nine: hit rate >= {HIT_RATE} of without", hits, HIT_RATE),
        at_most(f"the nine: p99 TTFT <= {TTFT}x of without", slower, TTFT),
    ]
    return verdict(figures, bars)


async def _question_words(stage: Stage) -> int:
    """Return how long the nine's questions have to be, by the rates that the replicas measure just now."""
    return int(await stage.prefill_tokens_per_s() * LOAD * EVERY_S / len(POLITE) / TOKENS_A_WORD)


async def _all(stage: Stage, words: int, seconds: float, first: int) -> list[Seen]:
    """Return what all nine saw in so many seconds; they begin in turn, and ask at the same moments each time."""

    async def one(number: int, tenant: str) -> Sequence[Seen]:
        await asyncio.sleep(EVERY_S * number / len(POLITE))
        gaps = random.Random(f"{tenant} gaps")
        watched = Watched(stage.url, stage.keys[tenant], _asks(tenant, words), EVERY_S, gaps=gaps)
        return await watched.during(seconds - EVERY_S * number / len(POLITE), first)

    everybody = await asyncio.gather(*(one(number, tenant) for number, tenant in enumerate(POLITE)))
    return [seen for each in everybody for seen in each]


def _asks(tenant: str, words: int) -> Ask:
    """Return what a tenant asks: a question that nobody asked before, after its system prompts in turn."""
    systems = [
        " ".join(random.Random(f"{tenant} {number}").choices(WORDS, k=SYSTEM_WORDS)) for number in range(SYSTEM_PROMPTS)
    ]

    def ask(number: int) -> dict[str, Any]:
        question = f"{number} {' '.join(random.Random(f'{tenant} {number}').choices(WORDS, k=words))}"
        messages = [
            {"role": "system", "content": systems[number % SYSTEM_PROMPTS]},
            {"role": "user", "content": question},
        ]
        return {"model": "demo", "messages": messages, "max_tokens": 16, "temperature": 0, "ignore_eos": True}

    return ask
