"""One replica of vLLM behind warmpath against plain `vllm serve`, over HTTP: decode throughput and warm TTFT.

Both servers are up, with the same model, dtype, threads and sizes; they are asked in turn, so that what else the
machine does cancels. For where vLLM is installed: `.venv-vllm/bin/python -m benchmarks vllm_serve --json FILE`
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common.client import chat_body, stream_answer, stream_chat
from benchmarks.common.paired import alternate, ratios
from benchmarks.common.prompts import text_of
from benchmarks.common.report import BenchmarkError, parser_of, write
from benchmarks.common.server import instance
from benchmarks.peers.vllm_serve import vllm_serve
from serve_app.checkpoints.sources.resolve import resolve_model
from serve_app.config.vllm import CPU_BLOCK_SIZE, MISSING, vllm_missing

_SEQUENCES = 16
_GIB = 1 << 30


def main() -> None:
    """Parse flags, run, write the JSON."""
    parser = parser_of(__doc__, "small")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--threads", type=int, default=max(1, (os.cpu_count() or 1) - 1), help="plain vLLM's core spins on one more"
    )
    parser.add_argument("--eager", action="store_true", help="neither of the two compiles the model")
    parser.add_argument("--prefix-tokens", type=int, default=8000)
    parser.add_argument("--new-tokens", type=int, default=256, help="of each sequence that is decoded")
    parser.add_argument("--decode-pairs", type=int, default=6, help="at least 5")
    parser.add_argument("--warm-pairs", type=int, default=20, help="at least 5")
    arguments = parser.parse_args()
    if min(arguments.decode_pairs, arguments.warm_pairs) < 5:
        parser.error("--decode-pairs and --warm-pairs must be at least 5: fewer pairs say nothing")
    if vllm_missing():
        raise BenchmarkError(f"{MISSING.replace('bin/warmpath', 'bin/python')} (this is {sys.executable})")
    model = resolve_model(arguments.model)
    sizes = {
        "max_model_len": arguments.prefix_tokens + 1024,
        "max_num_seqs": 2 * _SEQUENCES,
        "max_num_batched_tokens": 2048,
        "dtype": arguments.dtype,
        "block_size": CPU_BLOCK_SIZE,
    }
    ours = {**sizes, "num_threads": arguments.threads, "kv_cache_bytes": _GIB, "enforce_eager": arguments.eager}
    theirs = {name.replace("_", "-"): value for name, value in sizes.items()} | {"kv-cache-memory-bytes": _GIB}
    # Plain vLLM keeps this part of a CPU's memory for itself, and does not start where it is not there.
    theirs |= {"gpu-memory-utilization": 0.05} | ({"enforce-eager": True} if arguments.eager else {})
    threads = {"OMP_NUM_THREADS": str(arguments.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    flags = ["--model", arguments.model, "--engine", "vllm", "--replicas", "1"]
    flags += [f"--set={name}={value}" for name, value in ours.items()]
    with instance(*flags) as url, vllm_serve(model, arguments.model, theirs, threads) as plain:
        results = asyncio.run(measure(url, plain, model, arguments))
    decode, warm = results["decode"], results["warm_ttft"]
    said = (
        f"warmpath over vLLM divided by `vllm serve`, medians of pairs: {_SEQUENCES} sequences at once "
        f"{decode['ratio']:.3f} of its tokens a second; time to the first token of {arguments.prefix_tokens} cached "
        f"tokens {warm['ratio']:.2f} ({results['warm_ttft_added_ms']:+.1f} ms)."
    )
    write(arguments.json, vars(arguments), results, said)


async def measure(url: str, plain: str, model: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Ask both in turn; return the paired ratios."""
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None)) as client:

        async def tokens_per_s(base: str, pair: int) -> float:
            bodies = [
                {
                    "model": arguments.model, "temperature": 0, "max_tokens": arguments.new_tokens, "ignore_eos": True,
                    "prompt": text_of(32, model, 1000 + _SEQUENCES * pair + number),
                }
                for number in range(_SEQUENCES)
            ]  # fmt: skip
            started_s = time.perf_counter()
            answers = await asyncio.gather(*(stream_answer(client, f"{base}/v1/completions", each) for each in bodies))
            seconds = time.perf_counter() - started_s
            assert all(answer.completion_tokens == arguments.new_tokens for answer in answers)
            return float(_SEQUENCES * arguments.new_tokens / seconds)

        async def warm_s(base: str, question: int) -> float:
            system = text_of(arguments.prefix_tokens, model, 1)
            answer = await stream_chat(
                client, base, chat_body(arguments.model, 1, text_of(32, model, 10_000 + question), system)
            )
            if question and answer.cached_tokens < arguments.prefix_tokens - 2 * CPU_BLOCK_SIZE:
                raise BenchmarkError(f"{base} had {answer.cached_tokens} tokens cached")
            return answer.ttft_s

        for base in (url, plain):  # kernels, connections and the prefix: paid by what counts for nothing
            for number in range(3):
                await warm_s(base, number)
            await tokens_per_s(base, 99)
        decode = await alternate(
            arguments.decode_pairs, lambda pair: tokens_per_s(url, pair), lambda pair: tokens_per_s(plain, pair)
        )
        warm = ratios(
            *await alternate(
                arguments.warm_pairs, lambda pair: warm_s(url, 10 + pair), lambda pair: warm_s(plain, 10 + pair)
            )
        )
        return {
            "decode": {"unit": "tokens/s", **ratios(*decode)},
            "warm_ttft": {"unit": "s", **warm},
            "warm_ttft_added_ms": 1000 * (warm["measured"]["p50"] - warm["against"]["p50"]),
        }


if __name__ == "__main__":
    main()
