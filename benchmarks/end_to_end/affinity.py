"""Do requests find the replica that holds their prefix? Many system prompts, several replicas, concurrent clients.

Every prompt is asked `--rounds` times in random order by `--clients` at once. A request counts as served from cache
when its reused tokens cover the system prompt's full blocks but one. `--peers` puts other routers in front of as many
plain servers of the same engine (with `--engine vllm`: of `vllm serve`). `python -m benchmarks affinity --json FILE`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from benchmarks.common.client import Answer, chat_body, stream_chat
from benchmarks.common.engine_flag import add_engine_flag
from benchmarks.common.prompts import text_of
from benchmarks.common.report import names_of, parser_of, progress, spread, write
from benchmarks.common.server import instance
from benchmarks.peers.ray_prefix_router import ray_prefix_router
from benchmarks.peers.sglang_router import sglang_router
from benchmarks.peers.workers import workers
from router.settings import POLICY_NAMES
from serve_app.checkpoints.sources.resolve import resolve_model
from serve_app.config.vllm import CPU_BLOCK_SIZE

PEERS = ("ray_prefix_router", "sglang_router")


def main() -> None:
    """Parse flags, run each router on fresh replicas, write the JSON."""
    parser = parser_of(__doc__, "demo")
    add_engine_flag(parser, ["torch", "vllm", "simulated"], "torch")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--prompt-tokens", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--policies", type=names_of(POLICY_NAMES), default="estimated_ttft,power_of_two,round_robin")
    parser.add_argument("--peers", type=names_of(PEERS), default=[], help=" or ".join(PEERS))
    parser.add_argument("--sglang-python", default=os.environ.get("SGLANG_PYTHON", ""))
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if "sglang_router" in arguments.peers and not arguments.sglang_python:
        parser.error("--sglang-python is missing: see benchmarks/peers/sglang_router.py")
    results = {}
    for name in [*arguments.policies, *arguments.peers]:
        with server(name, arguments) as url:
            results[name] = asyncio.run(measure(url, name, arguments))
        print(f"{name}: {json.dumps(results[name])}", file=sys.stderr)  # a later one may fail
    each = ", ".join(f"{row['served_from_cache']:.1%} with {name}" for name, row in results.items())
    write(arguments.json, vars(arguments), results, f"Repeated prompts served from cache: {each}.")


@contextmanager
def server(name: str, arguments: argparse.Namespace) -> Iterator[str]:
    """Run replicas behind the policy or the peer of that name; yields the URL that clients use."""
    config: dict[str, Any] = {"model": arguments.model, "engine": arguments.engine, "kv_cache_bytes": 128 << 20}
    if arguments.engine == "vllm":  # alike here and in plain servers
        config |= {"block_size": CPU_BLOCK_SIZE, "num_threads": 1, "enforce_eager": True}
    if name in PEERS:
        with workers(arguments.replicas, config) as urls:
            router = ray_prefix_router(urls) if name == PEERS[0] else sglang_router(arguments.sglang_python, urls)
            with router as url:
                yield url
        return
    flags = ["--replicas", str(arguments.replicas), "--model", config.pop("model"), "--engine", config.pop("engine")]
    flags += [f"--set={key}={value}" for key, value in config.items()]
    with instance(*flags, f"--set=policy={name}") as url:
        yield url


async def measure(url: str, policy: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Send every prompt in random order; return the share of repeats that were hits, and TTFTs."""
    model_path = resolve_model(arguments.model)
    order = [prompt for prompt in range(arguments.prompts) for _ in range(arguments.rounds)]
    random.Random(arguments.seed).shuffle(order)  # a workload, not a secret
    seen: set[int] = set()
    first: list[Answer] = []
    repeats: list[Answer] = []
    turns = iter(progress(list(enumerate(order)), policy))
    async with httpx.AsyncClient(timeout=300) as client:

        async def work() -> None:
            for number, prompt in turns:
                is_first = prompt not in seen
                seen.add(prompt)
                system = text_of(arguments.prompt_tokens, model_path, prompt)
                body = chat_body(arguments.model, 4, f"Question number {number}?", system)
                (first if is_first else repeats).append(await stream_chat(client, url, body))

        await asyncio.gather(*(work() for _ in range(arguments.clients)))
    enough = arguments.prompt_tokens - 2 * (CPU_BLOCK_SIZE if arguments.engine == "vllm" else 16)
    hits = [answer for answer in repeats if answer.cached_tokens >= enough]
    tokens = sum(answer.prompt_tokens for answer in repeats)
    return {
        "repeats": len(repeats),
        "served_from_cache": len(hits) / len(repeats),
        "token_hit_rate_of_repeats": sum(answer.cached_tokens for answer in repeats) / tokens,
        "first_ttft_ms": spread([1000 * answer.ttft_s for answer in first]),
        "repeat_ttft_ms": spread([1000 * answer.ttft_s for answer in repeats]),
    }


if __name__ == "__main__":
    main()
