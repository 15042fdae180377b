"""Do requests find the replica that holds their prefix? Many system prompts, several replicas, concurrent clients.

The prompts fill `--working-set` of all pools together, and each is sent `--rounds` times in random order. Every policy
runs with and without pulls of KV.
"""

import asyncio
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import httpx

from benchmarks.common.harness import Findings, Options, benchmark, engine_flag, flag, names_flag, note
from benchmarks.common.prompts import text_of
from benchmarks.common.repeats import send_repeatedly
from benchmarks.common.report import metric_sum, spread
from benchmarks.common.server import instance, set_flags
from router.settings import POLICY_NAMES
from serve_app.checkpoints.kv_planner import kv_room
from serve_app.checkpoints.sources import resolve_model
from serve_app.config.app import AppConfig
from serve_app.config.engine import EngineName
from serve_app.replay.client import TimedAnswer, chat_body, stream_chat

MODES = ("off", "on")
DTYPE = "float32"


@benchmark(
    __doc__,
    engine_flag("torch", "copies"),
    flag("replicas", 4, "data-parallel ranks included"),
    flag("data-parallel-size", 1, "of vLLM: so many replicas form a group"),
    flag("prompts", 50),
    flag("prompt-tokens", 1000),
    flag("working-set", 0.6, "the prompts' share of all pools together"),
    flag("rounds", 6),
    flag("clients", 8),
    flag("runs", 1, "each with prompts of its own, one after another"),
    names_flag("policies", POLICY_NAMES, "estimated_ttft,power_of_two,round_robin"),
    names_flag("pulls", MODES, help_="kv_pull: off, on, or both"),
    model="demo",
)
def run(options: Options) -> Findings:
    """Run each router on fresh replicas."""
    results = {}
    for policy, pulls in product(options.policies, options.pulls):
        name = f"{policy}, pulls {pulls}"
        with server(policy, pulls, options) as url:
            for number in range(options.runs):
                row = f"{name}, run {number + 1}" if options.runs > 1 else name
                results[row] = asyncio.run(measure(url, row, options, number * options.prompts))
                note(f"{row}: {json.dumps(results[row])}")  # in case a later one fails
    return Findings(results, summary(results))


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
def server(policy: str, pulls: str, options: Options) -> Iterator[str]:
    """Run replicas behind a policy and yield the instance's URL."""
    size = block_size(options.engine)
    blocks = options.prompts * math.ceil(options.prompt_tokens / size)
    config: dict[str, Any] = {
        "engine": options.engine,
        "dtype": DTYPE,
        "block_size": size,
        "num_blocks": math.ceil(blocks / (options.working_set * options.replicas)),
        "kv_pull": pulls == "on",
        "policy": policy,
        "num_threads": 1,
        "enforce_eager": True,
        "data_parallel_size": options.data_parallel_size,
    }
    groups = options.replicas // options.data_parallel_size
    with instance("--model", options.model, "--replicas", str(groups), *set_flags(config)) as url:
        yield url


async def measure(url: str, name: str, options: Options, first: int = 0) -> dict[str, Any]:
    """Send every prompt in random order; return cache use, TTFTs in ms and pulled bytes. ``first``: the first's number.

    A repeat counts as served from the cache if its reused tokens cover all full blocks of the system prompt but one.
    """
    model_path = resolve_model(options.model)
    async with httpx.AsyncClient(timeout=300) as client:

        async def ask(number: int, prompt: int) -> TimedAnswer:
            system = text_of(options.prompt_tokens, model_path, first + prompt)
            return await stream_chat(client, url, chat_body(options.model, 4, f"Question number {number}?", system))

        sizes = {"prompts": options.prompts, "rounds": options.rounds, "clients": options.clients}
        answers = await send_repeatedly(ask, **sizes, seed=1, name=name)
        repeats = answers.repeats
        await asyncio.sleep(1.0)  # replicas report their counters twice a second
        metrics = await client.get(f"{url}/metrics")
    pulled_tokens = metric_sum(metrics.text, "warmpath_kv_pulled_tokens_total") if metrics.status_code == 200 else 0.0
    selected, delivered = (
        metric_sum(metrics.text, f"warmpath_router_{kind}_cached_tokens_total") for kind in ("selected", "delivered")
    )
    fields = json.loads((model_path / "config.json").read_text())
    enough = options.prompt_tokens - 2 * block_size(options.engine)
    return {
        "repeats": len(repeats),
        "served_from_cache": sum(answer.cached_tokens >= enough for answer in repeats) / len(repeats),
        "hit_rate": sum(answer.cached_tokens for answer in repeats) / sum(answer.prompt_tokens for answer in repeats),
        "delivered_as_predicted": delivered / selected if selected else 1.0,
        "pulled_bytes": round(pulled_tokens * kv_room(fields, DTYPE, 0).bytes_per_token),
        "first_ttft_ms": spread([1000 * answer.ttft_s for answer in answers.firsts]),
        "repeat_ttft_ms": spread([1000 * answer.ttft_s for answer in repeats]),
        "repeat_ttft_ms_mean": 1000 * sum(answer.ttft_s for answer in repeats) / len(repeats),
    }
