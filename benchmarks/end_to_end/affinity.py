"""Do requests find the replica that holds their prefix? Many system prompts, several replicas, concurrent clients.

The prompts fill `--working-set` of all pools together, and each is sent `--rounds` times in random order. Every policy
runs with and without pulls of KV.
"""

import argparse
import asyncio
import json
import math
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import httpx

from benchmarks.common.prompts import text_of
from benchmarks.common.report import add_engine_flag, metric_sum, names_of, parser_of, progress, spread, write
from benchmarks.common.server import instance
from router.settings import POLICY_NAMES
from serve_app.checkpoints.kv_planner import kv_room
from serve_app.checkpoints.sources import resolve_model
from serve_app.cli.bench import TimedAnswer, chat_body, stream_chat
from serve_app.config.app import AppConfig
from serve_app.config.engine import EngineName

MODES = ("off", "on")
DTYPE = "float32"


def main() -> None:
    """Parse flags, run each router on fresh replicas, write the JSON."""
    parser = parser_of(__doc__, "demo")
    add_engine_flag(parser, "torch", "copies")
    parser.add_argument("--replicas", type=int, default=4, help="data-parallel ranks included")
    parser.add_argument("--data-parallel-size", type=int, default=1, help="of vLLM: so many replicas form a group")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--working-set", type=float, default=0.6, help="the prompts' share of all pools together")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--runs", type=int, default=1, help="each with prompts of its own, one after another")
    parser.add_argument("--policies", type=names_of(POLICY_NAMES), default="estimated_ttft,power_of_two,round_robin")
    parser.add_argument("--pulls", type=names_of(MODES), default=",".join(MODES), help="kv_pull: off, on, or both")
    arguments = parser.parse_args()
    results = {}
    for policy, pulls in product(arguments.policies, arguments.pulls):
        name = f"{policy}, pulls {pulls}"
        with server(policy, pulls, arguments) as url:
            for run in range(arguments.runs):
                row = f"{name}, run {run + 1}" if arguments.runs > 1 else name
                results[row] = asyncio.run(measure(url, row, arguments, run * arguments.prompts))
                print(f"{row}: {json.dumps(results[row])}", file=sys.stderr)  # in case a later one fails
    write(arguments.json, vars(arguments), results, summary(results))


def summary(results: dict[str, dict[str, Any]]) -> str:
    """Return a sentence with the routers' figures."""
    rows = "; ".join(
        f"{name}: {row['served_from_cache']:.1%}, {row['pulled_bytes'] / 1e6:.0f} MB, "
        f"{row['repeat_ttft_ms']['p50']:.0f} and {row['repeat_ttft_ms']['p90']:.0f} ms"
        for name, row in results.items()
    )
    return f"Repeated prompts served from the cache, KV pulled for that, and their TTFT (p50 and p90). {rows}."


def block_size(engine: EngineName) -> int:
    """Return the tokens per block of an engine's pool."""
    return AppConfig(engine=engine).block_size


@contextmanager
def server(policy: str, pulls: str, arguments: argparse.Namespace) -> Iterator[str]:
    """Run replicas behind a policy and yield the instance's URL."""
    size = block_size(arguments.engine)
    blocks = arguments.prompts * math.ceil(arguments.prompt_tokens / size)
    config: dict[str, Any] = {
        "engine": arguments.engine,
        "dtype": DTYPE,
        "block_size": size,
        "num_blocks": math.ceil(blocks / (arguments.working_set * arguments.replicas)),
        "kv_pull": pulls == "on",
        "policy": policy,
        "num_threads": 1,
        "enforce_eager": True,
        "data_parallel_size": arguments.data_parallel_size,
    }
    flags = [f"--set={key}={json.dumps(value) if isinstance(value, bool) else value}" for key, value in config.items()]
    groups = arguments.replicas // arguments.data_parallel_size
    with instance("--model", arguments.model, "--replicas", str(groups), *flags) as url:
        yield url


async def measure(url: str, name: str, arguments: argparse.Namespace, first: int = 0) -> dict[str, Any]:
    """Send every prompt in random order; return cache use, TTFTs in ms and pulled bytes. ``first``: the first's number.

    A repeat counts as served from the cache if its reused tokens cover all full blocks of the system prompt but one.
    """
    model_path = resolve_model(arguments.model)
    order = [prompt for prompt in range(arguments.prompts) for _ in range(arguments.rounds)]
    random.Random(1).shuffle(order)
    seen: set[int] = set()
    news: list[TimedAnswer] = []
    repeats: list[TimedAnswer] = []
    turns = iter(progress(list(enumerate(order)), name))
    async with httpx.AsyncClient(timeout=300) as client:

        async def work() -> None:
            for number, prompt in turns:
                is_first = prompt not in seen
                seen.add(prompt)
                system = text_of(arguments.prompt_tokens, model_path, first + prompt)
                body = chat_body(arguments.model, 4, f"Question number {number}?", system)
                (news if is_first else repeats).append(await stream_chat(client, url, body))

        await asyncio.gather(*(work() for _ in range(arguments.clients)))
        await asyncio.sleep(1.0)  # replicas report their counters twice a second
        metrics = await client.get(f"{url}/metrics")
    pulled_tokens = metric_sum(metrics.text, "warmpath_kv_pulled_tokens_total") if metrics.status_code == 200 else 0.0
    selected, delivered = (
        metric_sum(metrics.text, f"warmpath_router_{kind}_cached_tokens_total") for kind in ("selected", "delivered")
    )
    fields = json.loads((model_path / "config.json").read_text())
    enough = arguments.prompt_tokens - 2 * block_size(arguments.engine)
    return {
        "repeats": len(repeats),
        "served_from_cache": sum(answer.cached_tokens >= enough for answer in repeats) / len(repeats),
        "hit_rate": sum(answer.cached_tokens for answer in repeats) / sum(answer.prompt_tokens for answer in repeats),
        "delivered_as_predicted": delivered / selected if selected else 1.0,
        "pulled_bytes": round(pulled_tokens * kv_room(fields, DTYPE, 0).bytes_per_token),
        "first_ttft_ms": spread([1000 * answer.ttft_s for answer in news]),
        "repeat_ttft_ms": spread([1000 * answer.ttft_s for answer in repeats]),
        "repeat_ttft_ms_mean": 1000 * sum(answer.ttft_s for answer in repeats) / len(repeats),
    }


if __name__ == "__main__":
    main()
