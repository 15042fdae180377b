"""Replicas are killed at random points of many short answers; each is compared with the undisturbed one.

Two levels: SIGKILLs of the replicas of a real instance (``--kills``), and calls that break at random tokens between the
ingress' own code and engines in this process (``--breaks``), thousands in seconds. Every option of the exact-resume
contract is drawn at random. `python -m benchmarks crashes --kills 1000 --engine simulated --json FILE`
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import Progress

from benchmarks.common.engine_flag import add_engine_flag
from benchmarks.common.report import parser_of, write
from benchmarks.common.server import instance
from benchmarks.crashes.calls import MOST_BREAKS, CallCrashes
from benchmarks.crashes.engines import ADAPTERS, call_crashes, instance_settings, public_prompts
from benchmarks.crashes.processes import ProcessCrashes
from benchmarks.crashes.questions import MOST_TOKENS, Questions
from benchmarks.crashes.tally import Broken, Tally
from serve_app.checkpoints.sources.resolve import resolve_model

AT_ONCE = 16
"""Questions that are under way together where calls break."""


def main() -> None:
    """Parse flags, run, write the JSON; exit status 1 where an answer was lost, cut or altered by a crash."""
    parser = parser_of(__doc__, "demo")
    add_engine_flag(parser, ["simulated", "torch", "vllm", "both"], "both")
    parser.add_argument("--kills", type=int, default=1000, help="SIGKILLs of replicas with streams under way; 0: none")
    parser.add_argument("--breaks", type=int, default=0, help="calls broken in this process; 0: none")
    parser.add_argument("--minutes", type=float, default=60.0, help="the longest time of either level, for each engine")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--questions", type=int, default=150, help="distinct ones, asked undisturbed before")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32", help="of the torch and vllm engines")
    parser.add_argument("--drafts", action="store_true", help="the torch engine speculates with a draft model")
    arguments = parser.parse_args()
    if arguments.replicas < 2:
        parser.error("--replicas must be at least 2: one is left at any moment")
    # A lost replica is expected here, and counted.
    logging.getLogger("serve_app.generation.dispatch").setLevel(logging.ERROR)
    model = resolve_model(arguments.model)
    results: dict[str, Any] = {}
    wrong = 0
    for kind in ["simulated", "torch"] if arguments.engine == "both" else [arguments.engine]:
        drafts = arguments.drafts and kind == "torch"
        found = results[kind] = {}
        with (
            tempfile.TemporaryDirectory(prefix="warmpath-crashes-") as name,
            Progress(console=Console(stderr=True)) as progress,
        ):
            directory, rng = Path(name), random.Random(arguments.seed)
            served = {
                "adapters": ADAPTERS,
                "prompt_refs": [prompt.ref for prompt in public_prompts(kind)],
                "needs_seed": kind == "simulated",
                "has_logits": kind != "simulated",
            }
            questions = Questions(rng, **served)  # type: ignore[arg-type]
            if arguments.breaks:
                task = progress.add_task(f"{kind}: broken calls", total=arguments.breaks)
                fit = {"dtype": arguments.dtype, "drafts": drafts}
                with call_crashes(kind, model, directory / "calls", rng, **fit) as crashes:
                    told = lambda broken: progress.update(task, completed=broken)  # noqa: E731, B023
                    until_s = time.monotonic() + arguments.minutes * 60
                    broken = break_calls(crashes, questions, rng, arguments.breaks, told, until_s=until_s)
                    found["calls"] = asyncio.run(broken)
                wrong += _wrong(found["calls"]["with_breaks"])
            if arguments.kills:
                task = progress.add_task(f"{kind}: killed replicas", total=arguments.kills)
                settings = instance_settings(
                    kind, model, directory / "kills", replicas=arguments.replicas, dtype=arguments.dtype, drafts=drafts
                )
                file = directory / "settings.yaml"
                file.write_text(yaml.safe_dump(settings))
                with instance("--config", str(file)) as url:
                    fuzz = ProcessCrashes(url, rng, arguments.clients)
                    until_s = time.monotonic() + arguments.minutes * 60
                    told = lambda kills: progress.update(task, completed=kills)  # noqa: E731, B023
                    run = fuzz.run(questions, arguments.questions, arguments.kills, until_s, told)
                    found["processes"] = asyncio.run(run)
                wrong += _wrong(found["processes"]["with_kills"])
    write(arguments.json, vars(arguments), results, said(results))
    if wrong:
        raise SystemExit(1)


async def break_calls(
    crashes: CallCrashes,
    questions: Questions,
    rng: random.Random,
    breaks: int,
    told: Callable[[int], None] = lambda _: None,
    *,
    until_s: float = math.inf,
) -> dict[str, Any]:
    """Ask questions alone, then many at once, then many at once with breaks, until so many calls have broken.

    ``told``: is called with their number so far. Ends at ``until_s`` of ``time.monotonic`` at the latest.
    """
    undisturbed, disturbed = Tally(), Tally()
    started_s, before = time.monotonic(), crashes.replicas.broken
    while (broken := crashes.replicas.broken - before) < breaks and time.monotonic() < until_s:
        told(broken)
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
    return {
        "broken_calls": broken,
        "seconds": time.monotonic() - started_s,
        "undisturbed_under_load": undisturbed.results(),
        "with_breaks": disturbed.results(),
    }


def break_points(rng: random.Random, choices: int) -> list[list[int]]:
    """Return, for each choice, after how many tokens its calls break, one after the other."""
    return [[rng.randrange(MOST_TOKENS // 2) for _ in range(rng.randrange(MOST_BREAKS + 1))] for _ in range(choices)]


def said(results: dict[str, dict[str, Any]]) -> str:
    """Return what was found, in a sentence for each engine and level."""
    levels = (
        ("calls", "with_breaks", "broken_calls", "broken calls"),
        ("processes", "with_kills", "kills", "SIGKILLs"),
    )
    tallies = {
        f"{kind}, {found[level][count]} {word}": found[level][key]
        for kind, found in results.items()
        for level, key, count, word in levels
        if level in found
    }
    each = [
        f"{name}: of {row['answers']} answers {row['lost']} were lost, {row['cut']} cut, {row['altered']} altered."
        for name, row in tallies.items()
    ]
    return " ".join(each) or "Nothing was asked for."


def _wrong(results: dict[str, Any]) -> int:
    return int(results["lost"]) + int(results["cut"]) + int(results["altered"])


if __name__ == "__main__":
    main()
