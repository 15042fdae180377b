"""A new version of a prompt under load: promoted once it is warm, against a plain edit of the text that clients send.

Simulated engines, open-loop traffic. Of each run and way: p99 of the time to first token before the change and from its
beginning on, and how many requests found the prompt cold. `python -m benchmarks cutover --runs 5 --json FILE`
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks.common.open_loop import Result, Shot, fire
from benchmarks.common.plots import figure_of, save
from benchmarks.common.prompts import text_of
from benchmarks.common.report import BenchmarkError, parser_of, percentile, progress, write
from benchmarks.common.server import instance
from serve_app.checkpoints.sources.resolve import resolve_model
from serve_app.prompts.lock import PromptDirectory

CHAT = "/v1/chat/completions"
WARM_UP_S = 5.0
"""Traffic before what is measured: first requests spread the old version over the replicas."""

WAYS = ("promote", "plain_edit")


def main() -> None:
    """Parse flags, run both ways on one instance, write the JSON, and the picture beside it."""
    parser = parser_of(__doc__, "demo")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=4000)
    parser.add_argument("--question-tokens", type=int, default=40)
    parser.add_argument("--requests-per-s", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=15.0, help="before the change, and as long from it on")
    parser.add_argument("--prefill-rate", type=float, default=10000.0, help="simulated, tokens a second")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", type=Path, help="PNG of the first run's times to first token")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model_path = resolve_model(arguments.model)
        shelf, texts = PromptDirectory(Path(directory)), {}
        for run in range(arguments.runs):
            for number, version in enumerate(("old", "new")):
                texts[run, version] = text_of(arguments.prompt_tokens, model_path, 2 * run + number)
                file = Path(directory) / "text"
                file.write_bytes(texts[run, version].encode())
                shelf.add(f"clerk{run}@{version}", file, None)
        flags = ["--model", arguments.model, "--replicas", str(arguments.replicas), "--engine", "simulated"]
        settings = [
            f"prompts_dir={directory}", "kv_cache_bytes=134217728",
            f"simulated_prefill_tokens_per_s={arguments.prefill_rate}",
        ]  # fmt: skip
        with instance(*flags, *(word for setting in settings for word in ("--set", setting))) as url:
            results = asyncio.run(measure(url, arguments, texts))
    single = {way: [run for run in runs if "all_runs" not in run] for way, runs in results.items()}
    ratios = {way: median(run["through_to_before"] for run in runs) for way, runs in single.items()}
    cold = {way: sum(run["cold_requests"] for run in runs) for way, runs in single.items()}
    write(
        arguments.json,
        vars(arguments),
        {"simulated": True, "median_through_to_before": ratios, **results},
        f"p99 of the time to first token through a change of version / before, simulated engines, median of "
        f"{arguments.runs} runs: {ratios['promote']:.2f} promoted ({cold['promote']} cold requests), "
        f"{ratios['plain_edit']:.2f} by a plain edit ({cold['plain_edit']} cold).",
    )


async def measure(url: str, arguments: argparse.Namespace, texts: dict[Any, str]) -> dict[str, list[dict[str, Any]]]:
    """Change every run's version in both ways, each under traffic of its own."""
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    async with httpx.AsyncClient(timeout=600) as client:

        async def promote(run: int, version: str) -> float:
            started_s = time.perf_counter()
            answer = await client.post(f"{url}/v1/prompts/promote", json={"prompt_ref": f"clerk{run}@{version}"})
            if answer.is_error:
                raise BenchmarkError(f"the promotion was refused: {answer.text[:300]}")
            return time.perf_counter() - started_s

        async def nothing() -> float:
            return 0.0

        for run in progress(range(arguments.runs), "runs"):
            await promote(run, "old")
            shots = shots_of(arguments, run, lambda _, name=f"clerk{run}": {"prompt_ref": name})  # type: ignore[misc]
            found["promote"].append(
                await change(url, shots, arguments, lambda run=run: promote(run, "new"))  # type: ignore[misc]
            )
            # Another first word: what was computed for the other way is of no use to this one.
            edited = {version: f"Edited {run}. {texts[run, version]}" for version in ("old", "new")}
            shots = shots_of(
                arguments,
                run,
                lambda new, edited=edited: {"system": edited["new" if new else "old"]},  # type: ignore[misc]
            )
            found["plain_edit"].append(await change(url, shots, arguments, nothing))
            if run == 0 and arguments.plot is not None:
                plot(arguments.plot, {way: runs[0] for way, runs in found.items()}, arguments)
    for runs in found.values():
        p99_s = [pooled_p99_s(runs, -arguments.seconds, 0.0), pooled_p99_s(runs, 0.0, arguments.seconds)]
        for each in runs:
            del each["times"]
        runs.append({"all_runs": True, "ttft_p99_before_s": p99_s[0], "ttft_p99_through_s": p99_s[1]})
    return found


def pooled_p99_s(runs: Sequence[dict[str, Any]], first_s: float, end_s: float) -> float:
    """Return the p99 of the times to first token of all runs' requests between two moments around the change."""
    return percentile([ttft_s for run in runs for at_s, ttft_s in run["times"] if first_s <= at_s < end_s], 99)


def shots_of(arguments: argparse.Namespace, run: int, prompt_of: Callable[[bool], dict[str, str]]) -> list[Shot]:
    """Return a run's requests; ``prompt_of``: how one before (False) or after the change (True) names its prompt."""
    rng = random.Random(arguments.seed * 1000 + run)  # a workload, not a secret
    change_s = WARM_UP_S + arguments.seconds
    # Requests come at the same moments before and after, so that a burst is no difference.
    moments_s = [arguments.seconds * rng.random() for _ in range(round(arguments.requests_per_s * arguments.seconds))]
    warm_up_s = [WARM_UP_S * rng.random() for _ in range(round(arguments.requests_per_s * WARM_UP_S))]
    times_s = [*warm_up_s, *(WARM_UP_S + at_s for at_s in moments_s), *(change_s + at_s for at_s in moments_s)]
    shots = []
    for number, at_s in enumerate(sorted(times_s)):
        prompt = dict(prompt_of(at_s >= change_s))
        question = " ".join(str(rng.randrange(1000)) for _ in range(arguments.question_tokens // 2))
        messages = [{"role": "user", "content": f"{number}: {question}"}]
        if "system" in prompt:
            messages.insert(0, {"role": "system", "content": prompt.pop("system")})
        body = {"model": arguments.model, "max_tokens": 2, "temperature": 0, "messages": messages, **prompt}
        shots.append(Shot(at_s, CHAT, body))
    return shots


async def change(
    url: str, shots: Sequence[Shot], arguments: argparse.Namespace, switch: Callable[[], Awaitable[float]]
) -> dict[str, Any]:
    """Send a run's requests, and switch when it is time. Raises BenchmarkError where one is not answered."""
    change_s = WARM_UP_S + arguments.seconds

    async def later() -> float:
        await asyncio.sleep(change_s)
        return await switch()

    results, took_s = await asyncio.gather(fire(url, shots, 120, lambda: None), later())
    failed = [result.reason for result in results if result.answer is None]
    if failed:
        raise BenchmarkError(f"{len(failed)} requests failed: {failed[0][:300]}")
    before = [result for result in results if WARM_UP_S <= result.shot.at_s < change_s]
    through = [result for result in results if result.shot.at_s >= change_s]
    p99_s = {name: percentile([each.ttft_s for each in part], 99) for name, part in _named(before, through)}
    return {
        "switch_s": took_s,
        "requests_before": len(before),
        "requests_through": len(through),
        "ttft_p50_before_s": percentile([each.ttft_s for each in before], 50),
        "ttft_p50_through_s": percentile([each.ttft_s for each in through], 50),
        "ttft_p99_before_s": p99_s["before"],
        "ttft_p99_through_s": p99_s["through"],
        "through_to_before": p99_s["through"] / p99_s["before"],
        "cold_requests": sum(
            each.answer is not None and each.answer.cached_tokens < arguments.prompt_tokens // 2 for each in through
        ),
        "times": [(each.shot.at_s - change_s, each.ttft_s) for each in results],
    }


def _named(before: list[Result], through: list[Result]) -> list[tuple[str, list[Result]]]:
    return [("before", before), ("through", through)]


def plot(path: Path, runs: dict[str, dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Draw each request's time to first token around the change."""
    figure = figure_of(9, 4.5)
    axes = figure.subplots()
    names = {"promote": "promoted once warm", "plain_edit": "plain edit"}
    for way, run in runs.items():
        axes.plot(*zip(*run["times"], strict=True), ".", label=names[way], alpha=0.7)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set(
        yscale="log",
        xlabel="s from the change",
        ylabel="time to first token, s",
        title=f"A new version of a prompt of {arguments.prompt_tokens} tokens, {arguments.replicas} simulated engines",
    )
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    save(figure, path)


if __name__ == "__main__":
    main()
