"""Inside Ray Serve LLM: mean TTFT behind our router and Ray's own, with equal vLLM replicas.

The prompts fill `--working-set` of both replicas' pools together. A few clients send each prompt `--rounds` times in
random order. The routers take turns in each of the `--runs`, and each run has its own prompts. With `--direct` the
bytes go from HAProxy to a replica, otherwise through Ray's ingress.
"""

import argparse
import asyncio
import math
import random
import statistics
from typing import Any

import httpx

from benchmarks.common.prompts import text_of
from benchmarks.common.report import names_of, parser_of, progress, spread, write
from benchmarks.peers.ray_llm import ENGINE, MODEL, ROUTERS, application, ray_llm
from serve_app.checkpoints.sources import resolve_model
from serve_app.cli.bench import RequestFailed, TimedAnswer, chat_body, stream_answer

BLOCK = ENGINE["block_size"]
REPLICAS = 2


def main() -> None:
    """Parse flags, run all routers side by side, write the JSON."""
    parser = parser_of(__doc__, "small")
    parser.add_argument("--routers", type=names_of(ROUTERS), default=",".join(list(ROUTERS)[:3]))
    parser.add_argument("--direct", action="store_true", help="direct streaming; kv_aware routes only there")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--working-set", type=float, default=0.6, help="the prompts' share of both pools together")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    blocks = arguments.prompts * math.ceil(arguments.prompt_tokens / BLOCK)
    engine = {
        "max_model_len": arguments.prompt_tokens + 200,
        "num_gpu_blocks_override": math.ceil(blocks / (arguments.working_set * REPLICAS)),
    }
    model = resolve_model(arguments.model)
    document = {"applications": [application(router, model, engine, REPLICAS) for router in arguments.routers]}
    runs: dict[str, list[dict[str, float]]] = {router: [] for router in arguments.routers}
    with ray_llm(document, f"/{arguments.routers[-1]}/v1/models", direct=arguments.direct, OMP_NUM_THREADS="1") as ray:
        for router in arguments.routers:
            asyncio.run(warm_up(f"{ray.url}/{router}"))
        for run in range(arguments.runs):
            for router in arguments.routers:
                name = f"run {run + 1}, {router}"
                runs[router].append(asyncio.run(measure(f"{ray.url}/{router}", name, run, arguments)))
    write(arguments.json, vars(arguments), {"runs": runs}, summary(runs))


async def warm_up(url: str) -> None:
    """Send some concurrent requests, so that no replica's first request is measured."""
    async with httpx.AsyncClient(timeout=300) as client:
        for round_ in range(3):
            bodies = [chat_body(MODEL, 4, f"{round_}. Are you there, {number}? " * 20) for number in range(8)]
            await asyncio.gather(*(stream_answer(client, f"{url}/v1/chat/completions", body) for body in bodies))


async def measure(url: str, name: str, run: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Send every prompt in random order; return the mean TTFT in ms, the hit rate and errors."""
    model = resolve_model(arguments.model)
    order = [prompt for prompt in range(arguments.prompts) for _ in range(arguments.rounds)]
    random.Random(run).shuffle(order)
    turns = iter(progress(list(enumerate(order)), name))
    seen: set[int] = set()
    answered: list[TimedAnswer] = []
    repeats: list[TimedAnswer] = []
    errors = 0
    async with httpx.AsyncClient(timeout=300) as client:

        async def work() -> None:
            nonlocal errors
            for number, prompt in turns:
                system = text_of(arguments.prompt_tokens, model, 1000 * run + prompt)
                body = chat_body(MODEL, 4, f"Question number {number}?", system)
                headers = {"authorization": f"Bearer tenant {prompt % 3}"}
                is_repeat = prompt in seen
                seen.add(prompt)
                try:
                    answer = await stream_answer(client, f"{url}/v1/chat/completions", body, headers)
                    answered.append(answer)
                    if is_repeat:
                        repeats.append(answer)
                except (RequestFailed, httpx.HTTPError):
                    errors += 1

        await asyncio.gather(*(work() for _ in range(arguments.clients)))
    return {
        "mean_ttft_ms": 1000 * statistics.fmean(answer.ttft_s for answer in answered),
        **{f"ttft_ms_{name}": value for name, value in spread([1000 * answer.ttft_s for answer in answered]).items()},
        "mean_repeat_ttft_ms": 1000 * statistics.fmean(answer.ttft_s for answer in repeats),
        "hit_rate": sum(a.cached_tokens for a in answered) / sum(a.prompt_tokens for a in answered),
        "errors": errors,
    }


def summary(runs: dict[str, list[dict[str, Any]]]) -> str:
    """Return each router's medians, and the ratio of ours to the best other one in the same runs."""
    rows = []
    for router, found in runs.items():
        times, hits = [row["mean_ttft_ms"] for row in found], [row["hit_rate"] for row in found]
        rows.append(
            f"{router}: {statistics.median(times):.0f} ms ({min(times):.0f} to {max(times):.0f}), "
            f"{statistics.median(hits):.1%} of the prompts' tokens cached, "
            f"{sum(row['errors'] for row in found):.0f} errors"
        )
    ratio = ""
    others = [found for router, found in runs.items() if router != "warmpath"]
    if others and "warmpath" in runs:
        best = min(statistics.median(row["mean_ttft_ms"] for row in found) for found in others)
        ours = statistics.median(row["mean_ttft_ms"] for row in runs["warmpath"])
        ratio = f" Ours to the best of the others: {ours / best:.2f}."
    return f"Mean TTFT, medians of {len(next(iter(runs.values())))} runs. {'; '.join(rows)}.{ratio}"


if __name__ == "__main__":
    main()
