"""Inside Ray Serve LLM: mean TTFT behind our router and Ray's own, with equal vLLM replicas.

The prompts fill `--working-set` of both replicas' pools together. A few clients send each prompt `--rounds` times in
random order. The routers take turns in each of the `--runs`, and each run has its own prompts. With `--direct` the
bytes go from HAProxy to a replica, otherwise through Ray's ingress.
"""

import asyncio
import math
import statistics
from typing import Any

import httpx

from benchmarks.common.harness import Findings, Options, benchmark, flag, in_turns, names_flag
from benchmarks.common.prompts import text_of
from benchmarks.common.repeats import send_repeatedly
from benchmarks.common.report import spread
from benchmarks.peers.ray_llm import ENGINE, MODEL, ROUTERS, application, ray_llm
from serve_app.checkpoints.sources import resolve_model
from serve_app.replay.client import RequestFailed, TimedAnswer, chat_body, stream_answer

BLOCK = ENGINE["block_size"]
REPLICAS = 2


@benchmark(
    __doc__,
    names_flag("routers", ROUTERS, ",".join(list(ROUTERS)[:3])),
    flag("direct", False, "direct streaming; kv_aware routes only there"),
    flag("prompts", 24),
    flag("prompt-tokens", 1000),
    flag("working-set", 0.6, "the prompts' share of both pools together"),
    flag("rounds", 5),
    flag("clients", 4),
    flag("runs", 5),
    model="small",
)
def run(options: Options) -> Findings:
    """Run all routers side by side."""
    blocks = options.prompts * math.ceil(options.prompt_tokens / BLOCK)
    engine = {
        "max_model_len": options.prompt_tokens + 200,
        "num_gpu_blocks_override": math.ceil(blocks / (options.working_set * REPLICAS)),
    }
    model = resolve_model(options.model)
    document = {"applications": [application(router, model, engine, REPLICAS) for router in options.routers]}
    with ray_llm(document, f"/{options.routers[-1]}/v1/models", direct=options.direct, OMP_NUM_THREADS="1") as ray:
        for router in options.routers:
            asyncio.run(warm_up(f"{ray.url}/{router}"))

        def turn(router: str, run: int) -> dict[str, float]:
            return asyncio.run(measure(f"{ray.url}/{router}", f"run {run + 1}, {router}", run, options))

        runs = in_turns(options.routers, options.runs, turn)
    return Findings({"runs": runs}, summary(runs))


async def warm_up(url: str) -> None:
    """Send some concurrent requests, so that no replica's first request is measured."""
    async with httpx.AsyncClient(timeout=300) as client:
        for round_ in range(3):
            bodies = [chat_body(MODEL, 4, f"{round_}. Are you there, {number}? " * 20) for number in range(8)]
            await asyncio.gather(*(stream_answer(client, f"{url}/v1/chat/completions", body) for body in bodies))


async def measure(url: str, name: str, run: int, options: Options) -> dict[str, float]:
    """Send every prompt in random order; return the mean TTFT in ms, the hit rate and errors."""
    model = resolve_model(options.model)
    async with httpx.AsyncClient(timeout=300) as client:

        async def ask(number: int, prompt: int) -> TimedAnswer:
            system = text_of(options.prompt_tokens, model, 1000 * run + prompt)
            body = chat_body(MODEL, 4, f"Question number {number}?", system)
            headers = {"authorization": f"Bearer tenant {prompt % 3}"}
            return await stream_answer(client, f"{url}/v1/chat/completions", body, headers)

        sizes = {"prompts": options.prompts, "rounds": options.rounds, "clients": options.clients}
        failures = (RequestFailed, httpx.HTTPError)
        answers = await send_repeatedly(ask, **sizes, seed=run, name=name, failures=failures)
        answered = answers.firsts + answers.repeats
    return {
        "mean_ttft_ms": 1000 * statistics.fmean(answer.ttft_s for answer in answered),
        **{f"ttft_ms_{name}": value for name, value in spread([1000 * answer.ttft_s for answer in answered]).items()},
        "mean_repeat_ttft_ms": 1000 * statistics.fmean(answer.ttft_s for answer in answers.repeats),
        "hit_rate": sum(a.cached_tokens for a in answered) / sum(a.prompt_tokens for a in answered),
        "errors": answers.failed,
    }


def summary(runs: dict[str, list[dict[str, Any]]]) -> str:
    """Return each router's medians, and the ratio of ours to the best other one in the same runs."""
    rows = []
    for router, turns in runs.items():
        times, hits = [row["mean_ttft_ms"] for row in turns], [row["hit_rate"] for row in turns]
        rows.append(
            f"{router}: {statistics.median(times):.0f} ms ({min(times):.0f} to {max(times):.0f}), "
            f"{statistics.median(hits):.1%} of the prompts' tokens cached, "
            f"{sum(row['errors'] for row in turns):.0f} errors"
        )
    ratio = ""
    others = [turns for router, turns in runs.items() if router != "warmpath"]
    if others and "warmpath" in runs:
        best = min(statistics.median(row["mean_ttft_ms"] for row in turns) for turns in others)
        ours = statistics.median(row["mean_ttft_ms"] for row in runs["warmpath"])
        ratio = f" Ours to the best of the others: {ours / best:.2f}."
    return f"Mean TTFT, medians of {len(next(iter(runs.values())))} runs. {'; '.join(rows)}.{ratio}"
