"""Attacks on one watched tenant: alone first, then the same under attack, on one instance and in one run.

Every scenario takes a fresh instance and returns figures and bars. What a bar is, is said where it is made.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.prompts import WORDS, text_of
from benchmarks.common.report import percentile
from benchmarks.isolation.hostile.attacker import Attacker, Outcome
from benchmarks.isolation.hostile.bodies import KINDS
from benchmarks.isolation.hostile.stage import WATCHED, Stage
from benchmarks.isolation.hostile.verdicts import (
    Bar,
    all_served,
    at_least,
    at_most,
    longest_wait_s,
    paired,
    served_share,
    side,
    tokens_per_s,
    ttft_bar,
    verdict,
    windows,
)
from benchmarks.isolation.hostile.watch import Seen, Watched

SERVED, TOKENS = 0.99, 0.8
WAIT_S, MEMORY_MB, KEPT_MB = 0.5, 200, 80
"""``KEPT_MB``: caches and allocators may keep so much of the first large bodies."""
COLD_TOKENS = 5000
CONNECTIONS = 10_000
LEAST_CONNECTIONS = 1000
OWN_ADDRESS = "127.0.0.1"
BODY_TIMEOUT_S = 60.0
TOLD_S = 5.0
SETTLE_S = 5.0
"""After it the memory of a refused body counts as kept."""
_LONG_ANSWER = 3.0
"""A window of goodput is so many polite answers long: then none is empty by chance."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How long. ``model_path``: whose tokenizer counts the cold prompts' tokens."""

    seconds: float
    model_path: Path

    @property
    def alone_s(self) -> float:
        """Seconds of the watched tenant alone."""
        return self.seconds / 2


Scenario = Callable[[Stage, Plan], Coroutine[Any, Any, dict[str, Any]]]


def small_chat(number: int) -> dict[str, Any]:
    """Return one small chat of an app: the same system prompt, and a question that nobody asked before."""
    question = " ".join(random.Random(number).choices(WORDS, k=12))
    messages = [{"role": "system", "content": _RULES}, {"role": "user", "content": f"{number}: {question}"}]
    return {"model": "demo", "messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": True}


_RULES = "Answer questions about contracts with care, and always name clause, date and party. " * 4


def chats(stage: Stage, every_s: float = 0.2, *, fresh: bool = False) -> Watched:
    """Return the watched tenant with its small chats."""
    return Watched(stage.url, stage.keys[WATCHED], small_chat, every_s, fresh=fresh)


async def retry_storm(stage: Stage, plan: Plan) -> dict[str, Any]:
    """12 connections send 128 short prompts each, again at once when refused or answered."""
    zeta = chats(stage)
    alone = await _alone(zeta, plan)
    polite, beside = await _under(stage, zeta, plan.seconds, 10_000, "retry_storm", connections=2, polite=True)
    await stage.left(polite.ended_s)
    storm, under = await _under(stage, zeta, plan.seconds, 20_000, "retry_storm")
    left = await stage.left(max(storm.ended_s, *(one.ended_s for one in under)))

    took_s = [reply.took_s for reply in polite.replies if reply.status == 200]
    window_s = max(5.0, _LONG_ANSWER * percentile(took_s, 50)) if took_s else 5.0
    from_s, to_s = storm.started_s, storm.started_s + plan.seconds
    goodput = windows(storm.replies, from_s, to_s, window_s, lambda reply: reply.completion_tokens / window_s)
    polite_rate = tokens_per_s(polite.replies, beside, polite.started_s, polite.started_s + plan.seconds)
    storm_rate = tokens_per_s(storm.replies, under, from_s, to_s)
    share = storm_rate / polite_rate if polite_rate else None
    figures = {
        **paired(alone, under),
        "attacker_tokens_ratio": share,
        "tokens_per_s": {"polite": polite_rate, "storm": storm_rate},
        "attacker_goodput_tokens_per_s": goodput,
        "window_s": window_s,
        "attacker_statuses": storm.statuses(),
        "beside_polite": side(beside),
        **left,
    }
    bars = [
        at_least(f"zeta: requests with 200 >= {SERVED:.0%}", served_share(under), SERVED),
        ttft_bar("zeta", alone, under),
        Bar("attacker: goodput > 0 in every window after the first", min(goodput[1:], default=None), _flows(goodput)),
        at_least(f"all: tokens/s >= {TOKENS} of a polite load", share, TOKENS),
    ]
    return verdict(figures, bars)


async def big_bodies(stage: Stage, plan: Plan) -> dict[str, Any]:
    """Six bodies of 8 MB at once, of every kind after the other; the ingress' memory is read all the time."""
    zeta = chats(stage, 0.1)
    alone = await _alone(zeta, plan)
    before = stage.ingress_bytes()
    peak = before
    worst: list[Seen] = []
    kinds: dict[str, Any] = {}
    for number, kind in enumerate(KINDS):
        enough = asyncio.Event()
        watching = asyncio.create_task(zeta.until(enough, first=(number + 1) * 10_000))
        memory = asyncio.create_task(_peak(stage, enough))
        async with Attacker("big_bodies", stage.target(), kind=kind) as attacker:
            await attacker.done(2 * BODY_TIMEOUT_S)
        enough.set()
        seen, highest = await watching, await memory
        worst += seen
        peak = max(peak, highest)
        kinds[kind] = {
            "longest_wait_s": longest_wait_s(seen) - longest_wait_s(alone),
            "attack_s": attacker.outcome.ended_s - attacker.outcome.started_s,
            "ingress_memory_growth_mb": _mb(highest - before),
            "attacker_statuses": attacker.outcome.statuses(),
            **side(seen),
        }
    await asyncio.sleep(SETTLE_S)
    kept = stage.ingress_bytes()
    figures = {
        **paired(alone, worst),
        "ingress_memory_before_mb": _mb(before),
        "ingress_memory_growth_mb": _mb(peak - before),
        "ingress_memory_kept_mb": _mb(kept - before),
        "kinds": kinds,
        **await stage.left(time.monotonic() - SETTLE_S),
    }
    bars = [
        *(
            at_most(f"{kind}: zeta's longest wait <= alone + {WAIT_S} s", seen["longest_wait_s"], WAIT_S)
            for kind, seen in kinds.items()
        ),
        at_most(f"ingress memory grows by <= {MEMORY_MB} MB", _mb(peak - before), MEMORY_MB),
        at_most(f"ingress memory returns: <= {KEPT_MB} MB kept", _mb(kept - before), KEPT_MB),
    ]
    return verdict(figures, bars)


async def long_texts(stage: Stage, plan: Plan) -> dict[str, Any]:
    """Six texts of 8 MB for ever; then a public prompt of 1 MiB before 128 prompts. Zeta's prompts are cold."""
    count = 3 * int(plan.seconds) + 3
    texts = [text_of(COLD_TOKENS, plan.model_path, number) for number in range(min(count, 60))]

    def cold(number: int) -> dict[str, Any]:
        text = f"{number} {texts[number % len(texts)]}"
        return {"model": "demo", "messages": [{"role": "user", "content": text}], "max_tokens": 1, "temperature": 0}

    zeta = Watched(stage.url, stage.keys[WATCHED], cold, 0.2, in_turn=True)
    alone = await _alone(zeta, plan)
    texts_outcome, by_texts = await _under(
        stage, zeta, plan.seconds, 3000, "big_bodies", kind="long_text", for_ever=True
    )
    await stage.left(texts_outcome.ended_s)
    references, by_references = await _under(stage, zeta, plan.seconds, 4000, "long_references")
    figures = {
        **paired(alone, [*by_texts, *by_references]),
        "by_texts": {**paired(alone, by_texts), "attacker_statuses": texts_outcome.statuses()},
        "by_references": {**paired(alone, by_references), "attacker_statuses": references.statuses()},
        **await stage.left(max(references.ended_s, by_references[-1].ended_s)),
    }
    bars = [
        ttft_bar("zeta beside six 8 MB texts", alone, by_texts),
        ttft_bar("zeta beside references to 1 MiB", alone, by_references),
        at_least(f"zeta: requests with 200 >= {SERVED:.0%}", figures["served_share"], SERVED),
    ]
    return verdict(figures, bars)


async def half_open(stage: Stage, plan: Plan) -> dict[str, Any]:
    """10,000 connections of another address with half a request each; then the same of zeta's own address."""
    zeta = chats(stage, fresh=True)
    alone = await _alone(zeta, plan)
    other, under = await _under(stage, zeta, plan.seconds, 10_000, "half_open", connections=CONNECTIONS)
    if other.notes["wanted"] < LEAST_CONNECTIONS:
        return {"not_measured": f"{other.notes['wanted']:.0f} files are too few: raise the hard limit (ulimit -Hn)"}
    await zeta.during(SETTLE_S, first=20_000)
    same, beside = await _under(
        stage, zeta, plan.seconds / 2, 30_000, "half_open", connections=CONNECTIONS, source=OWN_ADDRESS
    )
    figures = {
        **paired(alone, under),
        "connections": other.notes,
        "same_address": {**paired(alone, beside), "connections": same.notes},
        **await stage.left(max(same.ended_s, *(one.ended_s for one in beside))),
    }
    what = f"zeta beside {other.notes['wanted']:.0f} half-open: requests with 200 >= {SERVED:.0%}"
    bars = [at_least(what, served_share(under), SERVED)]
    return verdict(figures, bars)


async def leavers(stage: Stage, plan: Plan) -> dict[str, Any]:
    """1,000 clients leave in bursts, each at a random moment."""
    zeta = chats(stage)
    alone = await _alone(zeta, plan)
    enough = asyncio.Event()
    watching = asyncio.create_task(zeta.until(enough, first=10_000))
    async with Attacker("leavers", stage.target()) as attacker:
        await attacker.done(10 * plan.seconds)
    enough.set()
    under = await watching
    outcome = attacker.outcome
    left = await stage.left(max(outcome.ended_s, *(one.ended_s for one in under)))
    figures = {**paired(alone, under), "clients": outcome.notes, **left}
    bars = [
        at_most("sequences left 2 s after the last client: 0", left["left_running"], 0),
        at_most("blocks left 2 s after the last client: 0", left["left_blocks"], 0),
        at_most(f"the ingress is free to tell so within {TOLD_S:g} s", left["left_told_after_s"], TOLD_S),
    ]
    return verdict(figures, bars)


SCENARIOS: dict[str, Scenario] = {
    "retry_storm": retry_storm,
    "big_bodies": big_bodies,
    "long_texts": long_texts,
    "half_open": half_open,
    "leavers": leavers,
}
SETTINGS: dict[str, dict[str, Any]] = {"leavers": {"max_num_seqs": 16, "max_waiting_requests": 16}}
"""What scenarios need beside defaults: leavers find sequences that run, a waiting line, and refusals."""


async def _alone(zeta: Watched, plan: Plan) -> list[Seen]:
    """Watch ``zeta`` alone, once it is warm. Raises RuntimeError when it is not served."""
    await zeta.during(3, first=-1000)
    return all_served(await zeta.during(plan.alone_s))


async def _under(
    stage: Stage, zeta: Watched, seconds: float, first: int, name: str, **options: Any
) -> tuple[Outcome, list[Seen]]:
    """Watch ``zeta`` for so long while somebody attacks, and until what it asked then has ended."""
    async with Attacker(name, stage.target(), **options) as attacker:
        seen = await zeta.during(seconds, first)
    return attacker.outcome, seen


async def _peak(stage: Stage, enough: asyncio.Event) -> int:
    """Return the most that the ingress had in memory until ``enough`` was set."""
    pages = Path(f"/proc/{stage.ingress_pid()}/statm")
    highest = 0
    while not enough.is_set():
        highest = max(highest, int((await asyncio.to_thread(pages.read_text)).split()[1]))
        with suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                await enough.wait()
    return highest * 4096


def _flows(goodput: list[float]) -> bool:
    return len(goodput) > 1 and min(goodput[1:]) > 0


def _mb(size_bytes: float) -> float:
    return round(size_bytes / 2**20, 1)
