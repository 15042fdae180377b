"""How many misses are explained rightly: precision and recall by class, on forms that no rule was written for.

Each case is a pair of prompts in the demo model's tokens; the later one misses, and is explained by what was sent
before it. Then what a comparison costs, with all that is remembered of a tenant; no engine runs. With ``--pairs`` two
instances, simulated, explain misses or not, and warm requests go to them in turn.
`python -m benchmarks misses --json FILE`
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import Counter
from contextlib import ExitStack
from typing import Any

import httpx

from benchmarks.common.client import chat_body, stream_chat
from benchmarks.common.paired import alternate, ratios
from benchmarks.common.report import parser_of, write
from benchmarks.common.server import instance
from benchmarks.misses.cases import QUESTIONS, SENTENCES, Case, Prompt, cases
from router.protocol.block_hash import PrefixScope
from serve_app.checkpoints.sources.resolve import resolve_model
from serve_app.misses.explain import Miss, explain
from serve_app.misses.memory import FAMILY_PROMPTS, MAX_FAMILIES, SeenPrompt
from serve_app.tokenization.public_tokens import common_tokens
from serve_app.tokenization.tokenizer import PromptTokenizer

BLOCK = 16
WARM_UP = 5
"""Pairs before those that count."""


def main() -> None:
    """Parse flags, run, write the JSON."""
    parser = parser_of(__doc__, "demo")
    parser.add_argument("--half", choices=("develop", "held_out"), default="held_out")
    parser.add_argument("--pairs", type=int, default=0, help="warm requests to an instance with and one without")
    parser.add_argument("--wrong", action="store_true", help="print the cases that were explained wrongly")
    arguments = parser.parse_args()
    tokenizer = PromptTokenizer(resolve_model(arguments.model))
    chosen = cases(held_out=arguments.half == "held_out")
    found = [(case, explained(case, tokenizer)) for case in chosen]
    if arguments.wrong:
        for case, miss in found:
            if case.reason != miss.reason:
                print(f"{case.form}: {case.reason} was taken for {miss.reason}: {miss.found!r}")
    scores = score([(case.reason, miss.reason) for case, miss in found])
    cost = {tokens: cost_us(tokenizer, tokens) for tokens in (500, 4000, 32_000)}
    named = scores["all named"]
    lines = [f"{'class':12} {'cases':>5} {'precision':>9} {'recall':>7}"]
    lines += [
        f"{name:12} {each['cases']:5d} {each['precision']:9.3f} {each['recall']:7.3f}" for name, each in scores.items()
    ]
    summary = (
        f"{named['cases']} cases with a cause: precision {named['precision']:.3f}, recall {named['recall']:.3f}. "
        "A comparison takes "
        + ", ".join(f"{each:.0f} us at {tokens} tokens" for tokens, each in cost.items())
        + " of CPU (median; the tenant's memory is full)."
    )
    results: dict[str, Any] = {"scores": scores, "median_us": cost}
    if arguments.pairs:
        results["warm_ttft"] = warm = warm_ttft(arguments.pairs)
        summary += f" Warm TTFT with the detector divided by that without: {warm['ratio']:.3f}."
    write(arguments.json, {"half": arguments.half}, results, "\n".join([*lines, summary]))


def explained(case: Case, tokenizer: PromptTokenizer) -> Miss:
    """Return what the detector says of a case's later prompt; its KV is as far there as the difference lets it be."""
    earlier, later = _seen(case.earlier, tokenizer), _seen(case.later, tokenizer)
    cached_tokens = 0
    if case.reason not in ("evicted", "adapter", "salt"):
        cached_tokens = common_tokens(later.ids, earlier.ids) // BLOCK * BLOCK
    return explain(later, cached_tokens, [earlier], tokenizer.text_of)


def _seen(prompt: Prompt, tokenizer: PromptTokenizer) -> SeenPrompt:
    scope = PrefixScope("benchmark", prompt.lora, prompt.salt.encode())
    return SeenPrompt(tokenizer.encode(prompt.text, b"misses").token_ids, scope, prompt.system_chars, 0.0)


def score(pairs: list[tuple[str, str]]) -> dict[str, dict[str, Any]]:
    """Return cases, precision and recall by class, and over all cases, of (wanted, found)."""
    wanted, found = Counter(one for one, _ in pairs), Counter(other for _, other in pairs)
    right = Counter(one for one, other in pairs if one == other)
    scores: dict[str, dict[str, Any]] = {
        name: {
            "cases": wanted[name],
            "precision": right[name] / found[name] if found[name] else 1.0,
            "recall": right[name] / wanted[name],
        }
        for name in sorted(wanted)
    }
    # Over all classes: what is said of a miss beyond "never seen" and "text", and how much of it is right.
    told = sum(found[name] for name in found if name not in ("text", "never_seen"))
    named = sum(wanted[name] for name in wanted if name not in ("text", "never_seen"))
    hits = sum(right[name] for name in right if name not in ("text", "never_seen"))
    scores["all named"] = {"cases": named, "precision": hits / told if told else 1.0, "recall": hits / named}
    return scores


def cost_us(tokenizer: PromptTokenizer, tokens: int, repeats: int = 15) -> float:
    """Return the median microseconds of CPU of a comparison; a tenant's memory is full of prompts of so many tokens."""
    rng = random.Random(tokens)
    ids = tokenizer.encode("Words of a prompt that are not the same each time. " * tokens, b"cost").token_ids[:tokens]
    scope = PrefixScope("benchmark")

    def prompt() -> SeenPrompt:
        made = ids.copy()
        for _ in range(tokens // 20):
            made[rng.randrange(tokens)] = rng.randrange(4, 1000)
        return SeenPrompt(made, scope, 0, 0.0)

    earlier = [prompt() for _ in range(MAX_FAMILIES if tokens > 4000 else MAX_FAMILIES * FAMILY_PROMPTS)]
    for each in earlier:
        each.sketch  # noqa: B018  # made once, with the first miss after it came
    taken: list[float] = []
    for _ in range(repeats):
        changed = earlier[-1].ids.copy()
        changed[4] += 1
        later = SeenPrompt(changed, scope, 0, 0.0)
        begun_s = time.thread_time()
        explain(later, 0, earlier, tokenizer.text_of)
        taken.append(1e6 * (time.thread_time() - begun_s))
    return statistics.median(taken)


def warm_ttft(pairs: int) -> dict[str, Any]:
    """Return paired ratios of the time to first token of hits, with the detector and without; engines are simulated."""
    body = chat_body("demo", 1, QUESTIONS[0], system="\n".join(SENTENCES * 8))
    flags = ("--model", "demo", "--engine", "simulated", "--replicas", "1", "--set", "served_model_name=demo")

    async def run(urls: list[str]) -> tuple[list[float], list[float]]:
        async with httpx.AsyncClient(timeout=120) as client:

            async def ask(url: str) -> float:
                return (await stream_chat(client, url, body)).ttft_s

            return await alternate(pairs + WARM_UP, lambda _: ask(urls[0]), lambda _: ask(urls[1]))

    with ExitStack() as stack:
        urls = [
            stack.enter_context(instance(*flags, "--set", f"explain_misses={explains}"))
            for explains in ("true", "false")
        ]
        measured, against = asyncio.run(run(urls))
    return ratios(measured[WARM_UP:], against[WARM_UP:])


if __name__ == "__main__":
    main()
