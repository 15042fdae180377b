"""What warmpath costs those whom it cannot help, and what stands before the engine.

Every figure is a ratio of two things measured alternately, so that what else the machine does cancels: the engine
with its prefix cache on and off over requests that share nothing; requests with a private salt and without, behind a
registered public prompt and behind a private one, over HTTP; HTTP through the whole app and the engine alone.
`python -m benchmarks overhead --json FILE`
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml

from benchmarks.common.client import Answer, chat_body, stream_chat
from benchmarks.common.output_collector import OutputCollector
from benchmarks.common.paired import alternate, ratios
from benchmarks.common.prompts import text_of, tokenizer_of
from benchmarks.common.report import parser_of, progress, write
from benchmarks.common.running import running
from benchmarks.common.server import instance
from router.feed import FeedPublisher, FeedPublisherThread
from router.protocol.block_hash import PrefixScope
from serve_app.checkpoints.checkpoint import load_checkpoint_info
from serve_app.checkpoints.sources.resolve import resolve_model
from serve_app.engine.core.build import build_engine
from serve_app.engine.core.engine import TorchEngine
from serve_app.engine.protocol import EngineRequest, SamplingParams
from serve_app.engine.runner.model_runner import ModelRunner
from serve_app.engine.runner.simulated_runner import CostModel, SimulatedRunner
from serve_app.engine.settings import EngineSettings
from serve_app.engine.step import Runner

SCOPE = PrefixScope("overhead benchmark")
ROOT = SCOPE.root(b"overhead benchmark")
BLOCK = 16
PUBLIC = 500
"""Prompts with this number and above are registered as public ones."""


def main() -> None:
    """Parse flags, run, write the JSON."""
    parser = parser_of(__doc__, "small")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--runs", type=int, default=8, help="pairs of runs with the cache on and off, at least 5")
    parser.add_argument("--requests", type=int, default=24, help="requests of such a run")
    parser.add_argument("--prompt-tokens", type=int, default=384)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--prefix-tokens", type=int, default=4000, help="system prompt of the requests over HTTP")
    parser.add_argument("--cold", type=int, default=8, help="pairs of cold requests, at least 5")
    parser.add_argument("--warm", type=int, default=80, help="pairs of warm requests, at least 5")
    arguments = parser.parse_args()
    if min(arguments.runs, arguments.cold, arguments.warm) < 5:
        parser.error("--runs, --cold and --warm must be at least 5: fewer pairs say nothing")
    model = resolve_model(arguments.model)
    sharing = asyncio.run(no_sharing(model, arguments))
    host = asyncio.run(host_cost(arguments))
    public = [
        {"name": f"prompt-{number}", "version": "1", "text": text_of(arguments.prefix_tokens, model, PUBLIC + number)}
        for number in range(arguments.cold)
    ]
    with tempfile.NamedTemporaryFile("w", prefix="warmpath-overhead-", suffix=".yaml") as file:
        yaml.safe_dump({"public_prompts": public}, file)
        file.flush()
        flags = ("--model", arguments.model, "--replicas", "1", "--config", file.name)
        sizes = ("--set", f"dtype={arguments.dtype}", "--set", f"num_threads={arguments.threads}")
        with instance(*flags, *sizes) as url:
            over_http = asyncio.run(http_ratios(url, model, arguments))
    results: dict[str, Any] = {
        "no_sharing_throughput_ratio": sharing["ratio"],
        "private_salt_ttft_ratio": over_http["private_salt"]["ratio"],
        "public_prompt_ttft_ratio": over_http["public_prompt"]["ratio"],
        "front_door_ttft_ratio": over_http["front_door_warm"]["ratio"],
        "front_door_cold_ttft_ratio": over_http["front_door_cold"]["ratio"],
        "details": {"no_sharing": sharing, "no_sharing_host_s": host, **over_http},
    }
    said = (
        f"Tokens a second with nothing shared, cache on / off: {results['no_sharing_throughput_ratio']:.3f}. "
        f"TTFT: private salt / none {results['private_salt_ttft_ratio']:.3f}, public prompt / private "
        f"{results['public_prompt_ttft_ratio']:.3f}, HTTP / engine alone {results['front_door_ttft_ratio']:.2f} warm, "
        f"{results['front_door_cold_ttft_ratio']:.2f} cold."
    )
    write(arguments.json, vars(arguments), results, said)


async def no_sharing(model: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare tokens per second with the prefix cache on and off; the pool is too small for all, so blocks are evicted.

    Both sides run over the same loaded model and the same KV memory, one after the other.
    """
    settings = EngineSettings(
        num_blocks=too_few_blocks(arguments), dtype=arguments.dtype, num_threads=arguments.threads
    )
    with ThreadPoolExecutor(max_workers=1) as loader:
        runner = loader.submit(ModelRunner, model, settings).result()
    throughput(runner, settings, arguments, 10_000)
    turns = iter(progress(range(2 * arguments.runs), "no sharing"))

    async def tokens_per_s(pair: int, caching: bool) -> float:
        next(turns)
        return throughput(runner, replace(settings, enable_prefix_caching=caching), arguments, pair)

    on, off = await alternate(arguments.runs, lambda p: tokens_per_s(p, True), lambda p: tokens_per_s(p, False))
    next(turns, None)
    return {"unit": "tokens/s", **ratios(on, off)}


def too_few_blocks(arguments: argparse.Namespace) -> int:
    """Return room for two thirds of a run's requests."""
    requests, tokens_each = int(arguments.requests), int(arguments.prompt_tokens + arguments.new_tokens)
    return math.ceil(tokens_each / BLOCK) * max(2, requests * 2 // 3)


async def host_cost(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare what the same requests cost the engine's own Python, with a model that takes no time at all.

    The difference a token is what the cache adds to each token's computation, whatever the model.
    """
    cost = CostModel(prefill_tokens_per_s=1e12, decode_base_s=0.0, decode_per_sequence_s=0.0)
    runner = SimulatedRunner(cost, sleep=lambda _: None)
    settings = EngineSettings(num_blocks=too_few_blocks(arguments))
    tokens = arguments.requests * (arguments.prompt_tokens + arguments.new_tokens)

    async def seconds(pair: int, caching: bool) -> float:
        side = replace(settings, enable_prefix_caching=caching)
        return float(tokens) / throughput(runner, side, arguments, pair)

    on, off = await alternate(5 * arguments.runs, lambda p: seconds(p, True), lambda p: seconds(p, False))
    found = ratios(on, off)
    added = (found["measured"]["p50"] - found["against"]["p50"]) / tokens
    return {"unit": "s", "added_us_per_token": 1e6 * added, **found}


def throughput(runner: Runner, settings: EngineSettings, arguments: argparse.Namespace, seed: int) -> float:
    """Return prompt and new tokens per second of requests that share nothing, all submitted at once.

    The engine is new, its cache empty and its events published as a replica's are.
    """
    generator = np.random.default_rng(seed)

    def request(name: str, prompt_tokens: int, new_tokens: int) -> EngineRequest:
        ids = generator.integers(300, runner.vocab_size, prompt_tokens, dtype=np.int32)
        return EngineRequest(name, ids, SCOPE, ROOT, SamplingParams(new_tokens, temperature=0.0))

    feed = FeedPublisherThread(FeedPublisher("overhead"))
    engine = TorchEngine(runner, settings, feed.put)
    collector = OutputCollector()
    with running(feed), running(engine):
        collector.answer_all(engine, [request("first", 64, 2)])
        sizes = arguments.prompt_tokens, arguments.new_tokens
        seconds = collector.answer_all(engine, [request(f"r{i}", *sizes) for i in range(arguments.requests)])
    assert max(collector.cached_tokens.values(), default=0) == 0, "requests were to share nothing"
    return float(arguments.requests * (arguments.prompt_tokens + arguments.new_tokens) / seconds)


async def http_ratios(url: str, model: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure everything that needs a running instance (of one replica); TTFT in seconds."""
    info = load_checkpoint_info(model)
    settings = EngineSettings(
        num_blocks=8192,
        max_model_len=info.max_model_len,
        dtype=arguments.dtype,
        num_threads=arguments.threads,
        model_fingerprint=info.fingerprint,
    )
    engine = build_engine(model, settings, lambda _: None)
    with running(engine):
        async with httpx.AsyncClient(timeout=300) as client:
            asked = Asked(client, url, engine, model, arguments)
            # Connections, kernels and the tokenizer's first use are paid by requests that count for nothing.
            for _ in range(2):
                await asked.over_http(99, 0)
                asked.alone(99, 0)
            return await asked.measure()


class Asked:
    """Asks the same prompts over HTTP and of an engine in this process; each answer is one token."""

    def __init__(
        self, client: httpx.AsyncClient, url: str, engine: TorchEngine, model: Path, arguments: argparse.Namespace
    ) -> None:
        self._client = client
        self._url = url
        self._engine = engine
        self._model = model
        self._arguments = arguments
        self._numbers = iter(range(1 << 40))

    async def measure(self) -> dict[str, Any]:
        """Return the paired ratios by name."""
        count, pairs = self._arguments.cold, self._arguments.warm
        prefix, most = self._arguments.prefix_tokens // BLOCK * BLOCK, 1000
        http_s, alone_s = self._http_s, self._alone_s
        cold = await self._pairs("cold", count, lambda p: http_s(p, p, 0), lambda p: alone_s(p, p, 0))
        warm = await self._pairs(
            "warm", pairs, lambda p: http_s(p % count, most + p, prefix), lambda p: alone_s(p % count, most + p, prefix)
        )
        for prompt in range(count):
            await self.over_http(prompt, 0, "private")
        salt = await self._pairs(
            "private salt",
            pairs,
            lambda p: http_s(p % count, 2 * most + p, prefix, "private"),
            lambda p: http_s(p % count, 3 * most + p, prefix),
        )
        for prompt in range(count):
            await self.over_http(PUBLIC + prompt, 0)
        public = await self._pairs(
            "public prompt",
            pairs,
            lambda p: http_s(PUBLIC + p % count, 4 * most + p, prefix),
            lambda p: http_s(p % count, 5 * most + p, prefix),
        )
        return {"front_door_cold": cold, "front_door_warm": warm, "private_salt": salt, "public_prompt": public}

    async def over_http(self, prompt: int, question: int, salt: str | None = None) -> Answer:
        """Ask through the whole app."""
        body = self._body(prompt, question)
        return await stream_chat(self._client, self._url, {**body, "cache_salt": salt} if salt else body)

    def alone(self, prompt: int, question: int) -> tuple[float, int]:
        """Ask the engine itself, with the ids ready; return seconds to the first token and cached tokens."""
        tokenizer = tokenizer_of(self._model)
        ids = tokenizer.encode(tokenizer.render_chat(self._body(prompt, question)["messages"]).text, ROOT).token_ids
        collector = OutputCollector()
        name = str(next(self._numbers))
        started_s = time.perf_counter()
        request = EngineRequest(name, ids, SCOPE, ROOT, SamplingParams(1, temperature=0.0))
        collector.answer_all(self._engine, [request])
        return collector.first_s[name] - started_s, collector.cached_tokens[name]

    async def _http_s(self, prompt: int, question: int, cached: int, salt: str | None = None) -> float:
        answer = await self.over_http(prompt, question, salt)
        self._check(answer.cached_tokens, cached)
        return answer.ttft_s

    async def _alone_s(self, prompt: int, question: int, cached: int) -> float:
        seconds, found = await asyncio.to_thread(self.alone, prompt, question)
        self._check(found, cached)
        return seconds

    def _check(self, found: int, wanted: int) -> None:
        """Raise unless a request hit what it was to hit: its prefix, and not the question."""
        if not wanted <= found <= wanted + 2 * BLOCK:
            raise RuntimeError(f"{found} tokens came from the cache; about {wanted} were to")

    async def _pairs(self, name: str, pairs: int, measured: Any, against: Any) -> dict[str, Any]:
        turns = iter(progress(range(pairs), name))

        async def counted(pair: int) -> float:
            next(turns)
            return float(await measured(pair))

        found = ratios(*await alternate(pairs, counted, against))
        next(turns, None)
        return {"unit": "s", **found}

    def _body(self, prompt: int, question: int) -> dict[str, Any]:
        system = text_of(self._arguments.prefix_tokens, self._model, prompt)
        return chat_body(self._arguments.model, 1, text_of(32, self._model, 10_000 + question), system)


if __name__ == "__main__":
    main()
