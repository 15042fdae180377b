"""One engine workload and its times, for all systems: JSON on standard input and output.

It uses only the standard library, because it also runs under a peer's own Python.
"""

import json
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

TokenPrompt = list[int]


class System(Protocol):
    """A measured engine."""

    def generate(self, prompts: list[TokenPrompt], max_tokens: int) -> None:
        """Answer all prompts at once, greedily, with ``max_tokens`` each."""


S = TypeVar("S", bound=System)

DECODE_ROWS, DECODE_PROMPT_TOKENS, DECODE_NEW_TOKENS = 16, 32, 64
"""The size of the decode measurement; all its sequences are new."""


def prompts_of(count: int, tokens: int, vocab_size: int, seed: int) -> list[TokenPrompt]:
    """Return prompts of random ids, without the first few hundred, which are special tokens."""
    generator = random.Random(seed)
    return [[generator.randrange(300, vocab_size) for _ in range(tokens)] for _ in range(count)]


def measure(workload: dict[str, Any], system: System, progress: Callable[[str], None]) -> dict[str, list[float]]:
    """Return each measurement's seconds in ``runs`` runs. Every prompt is new, except the warm prefix."""
    vocab, runs = workload["vocab_size"], workload["runs"]
    prefix, question = workload["prefix_tokens"], workload["question_tokens"]
    seed = iter(range(1, 1_000_000))

    def timed(prompts: list[TokenPrompt], max_tokens: int) -> float:
        started_s = time.perf_counter()
        system.generate(prompts, max_tokens)
        return time.perf_counter() - started_s

    # Warm up: this compiles kernels and fills allocators for all later shapes.
    timed(prompts_of(1, prefix + question, vocab, next(seed)), 1)
    timed(prompts_of(16, 32, vocab, next(seed)), 8)
    results: dict[str, list[float]] = {"cold_s": [], "warm_s": [], "decode_s": [], "batch_s": []}
    for run in range(runs):
        progress(f"run {run + 1} of {runs}")
        (head,) = prompts_of(1, prefix, vocab, next(seed))
        results["cold_s"].append(timed([head + prompts_of(1, question, vocab, next(seed))[0]], 1))
        results["warm_s"].append(timed([head + prompts_of(1, question, vocab, next(seed))[0]], 1))
        decoded = prompts_of(DECODE_ROWS, DECODE_PROMPT_TOKENS, vocab, next(seed))
        results["decode_s"].append(timed(decoded, DECODE_NEW_TOKENS))
        results["batch_s"].append(timed(prompts_of(32, 1024, vocab, next(seed)), workload["batch_new_tokens"]))
    return results


def serve(make: Callable[[dict[str, Any]], S], version: Callable[[], str]) -> None:
    """Run as a peer's process: read the workload, measure, print the result."""
    workload = json.load(sys.stdin)
    # A peer's own prints go to standard error, so that standard output holds only the result.
    result = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def progress(text: str) -> None:
        print(f"{workload['system']}: {text}", file=sys.stderr, flush=True)

    seconds = measure(workload, make(workload), progress)
    print(json.dumps({"version": version(), "seconds": seconds}), file=result, flush=True)
