"""The engine alone against its peers: cold and warm time to first token, decode, and a batch of long prompts.

The systems run in separate processes, one after the other, with the same prompts and the same size of KV blocks.
"""

import os
import sys
from typing import Any

from benchmarks.common.harness import Findings, Options, apart, benchmark, flag, names_flag, rows_of
from benchmarks.common.report import spread
from benchmarks.peers.workload import DECODE_NEW_TOKENS, DECODE_ROWS
from serve_app.checkpoints.checkpoint import load_checkpoint_info
from serve_app.checkpoints.sources import resolve_model
from serve_app.config.engine import VLLM_CPU_BLOCK_SIZE, vllm_missing

MODULES = {
    "warmpath": "benchmarks.peers.warmpath_engine",
    "warmpath_vllm": "benchmarks.peers.warmpath_engine",
    "vllm_cpu": "benchmarks.peers.vllm_cpu",
}
"""``warmpath_vllm``: vLLM under warmpath. The first measured system of ours is compared with all others."""


@benchmark(
    __doc__,
    flag("dtype", "bfloat16"),
    flag("device", "auto"),
    flag("threads", os.cpu_count() or 1),
    flag("runs", 5),
    flag("prefix-tokens", 8000),
    flag("question-tokens", 32),
    flag("batch-new-tokens", 64),
    flag("block-size", VLLM_CPU_BLOCK_SIZE, "vLLM's minimum on a CPU is 32"),
    names_flag("systems", MODULES),
    flag("vllm-python", os.environ.get("VLLM_PYTHON", "" if vllm_missing() else sys.executable)),
    model="small",
)
def run(options: Options) -> Findings:
    """Measure each system."""
    info = load_checkpoint_info(resolve_model(options.model))
    names = ("dtype", "device", "threads", "runs", "block_size", "prefix_tokens", "question_tokens", "batch_new_tokens")
    workload = {
        "model": str(info.path),
        "vocab_size": info.vocab_size,
        "max_model_len": min(info.max_model_len, 16384),
        "cache_tokens": 131072,
        **{name: getattr(options, name) for name in names},
    }
    results = rows_of(options.systems, lambda name: measure(name, workload, options.vllm_python))
    return Findings({"systems": results, "ratios": ratios(results)}, summary(results))


def summary(results: dict[str, dict[str, Any]]) -> str:
    """Return a sentence for each system, and the ratios."""
    sentences = [
        f"{name}: first token after {row['warm_ttft_ms']:.0f} ms cached and {row['cold_ttft_ms']:.0f} ms cold, "
        f"{row['decode_tok_s']:.0f} tokens per second in a batch of {DECODE_ROWS}."
        if "cold_ttft_ms" in row
        else f"{name}: not measured, {row['not_measured']}."
        for name, row in results.items()
    ]
    sentences += [
        f"{ours_of(results)} / {peer}: TTFT {ratio['warm_ttft_ms']:.2f} cached and {ratio['cold_ttft_ms']:.2f} cold, "
        f"decode rate {ratio['decode_tok_s']:.2f}."
        for peer, ratio in ratios(results).items()
    ]
    return " ".join(sentences)


def measure(name: str, workload: dict[str, Any], vllm_python: str) -> dict[str, Any]:
    """Measure one system; a failure becomes a row with the reason."""
    python = sys.executable if name == "warmpath" else vllm_python
    if not python:
        return {"not_measured": "no --vllm-python given; see benchmarks/peers/vllm_cpu.py"}
    answer = apart(MODULES[name], {**workload, "system": name}, python=python)
    if "seconds" not in answer:
        return answer
    return {"version": answer["version"], **figures(answer["seconds"], workload)}


def figures(seconds: dict[str, list[float]], workload: dict[str, Any]) -> dict[str, Any]:
    """Return the medians, and the spread in seconds."""
    prompt = workload["prefix_tokens"] + workload["question_tokens"]
    cold, warm = spread(seconds["cold_s"]), spread(seconds["warm_s"])
    decode, batch = spread(seconds["decode_s"]), spread(seconds["batch_s"])
    return {
        "cold_ttft_ms": 1000 * cold["p50"],
        "warm_ttft_ms": 1000 * warm["p50"],
        "prefill_tok_s": prompt / cold["p50"],
        "decode_tok_s": DECODE_ROWS * DECODE_NEW_TOKENS / decode["p50"],
        "throughput_32x1024_tok_s": 32 * workload["batch_new_tokens"] / batch["p50"],
        "spread_s": {"cold": cold, "warm": warm, "decode": decode, "batch": batch},
    }


def ours_of(results: dict[str, dict[str, Any]]) -> str:
    """Return the name of our system that the others are compared with, "" for none."""
    return next((name for name in results if name.startswith("warmpath")), "")


def ratios(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return ours / theirs for every measured peer."""
    names = ("cold_ttft_ms", "warm_ttft_ms", "prefill_tok_s", "decode_tok_s", "throughput_32x1024_tok_s")
    first = ours_of(results)
    ours = results.get(first, {})
    return {
        peer: {name: ours[name] / theirs[name] for name in names}
        for peer, theirs in results.items()
        if peer != first and names[0] in theirs and names[0] in ours
    }
