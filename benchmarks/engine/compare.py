"""The engine alone against its peers: time to first token cold and warm, decode, and a batch of long prompts.

Every system runs in a process of its own, one after the other, with the same prompts (`benchmarks.peers.workload`).
On a GPU also the memory-bandwidth limit of decoding: `--device cuda --model random:llama-3.1-8b`.
`python -m benchmarks engine --json FILE [--vllm-python /path/to/env/bin/python]`; with `--engine vllm`, also by that
Python, what our engine over vLLM takes beside vLLM alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import random_models
from benchmarks.common.report import names_of, parser_of, progress, spread, write
from benchmarks.peers.workload import DECODE_NEW_TOKENS, DECODE_ROWS
from serve_app.checkpoints.checkpoint import load_checkpoint_info
from serve_app.checkpoints.sources.resolve import resolve_model
from serve_app.config.vllm import MISSING, vllm_missing

MODULES = {
    "warmpath": "benchmarks.peers.warmpath_engine",
    "vllm_cpu": "benchmarks.peers.vllm_cpu",
    "transformers_cb": "benchmarks.peers.transformers_cb",
}
WARMPATH_VLLM = "benchmarks.peers.warmpath_vllm"
"""What "warmpath" is with `--engine vllm`."""
ROOT = Path(__file__).parents[2]
TIMEOUT_S = 1800


def main() -> None:
    """Parse flags, run each system, write the JSON."""
    parser = parser_of(__doc__)
    shapes = ", ".join(random_models.PREFIX + name for name in random_models.SHAPES)
    parser.add_argument("--model", default="small", help=f"a built-in model, a directory, or {shapes}: random weights")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--prefix-tokens", type=int, default=8000)
    parser.add_argument("--question-tokens", type=int, default=32)
    parser.add_argument("--batch-new-tokens", type=int, default=64)
    parser.add_argument("--systems", type=names_of(MODULES), default=",".join(MODULES))
    here = "" if vllm_missing() else sys.executable
    parser.add_argument("--vllm-python", default=os.environ.get("VLLM_PYTHON", here))
    parser.add_argument("--engine", choices=["torch", "vllm"], default="torch", help="what warmpath is measured with")
    arguments = parser.parse_args()
    if arguments.engine == "vllm" and not arguments.vllm_python:
        parser.error(f"--engine vllm: no --vllm-python given; {MISSING}")
    if arguments.engine == "vllm" and arguments.model.startswith(random_models.PREFIX):
        parser.error("--engine vllm: warmpath loads no random weights into vLLM; name a checkpoint")
    with tempfile.TemporaryDirectory(prefix="warmpath-shape-") as directory:
        workload = {
            **described(arguments.model, Path(directory)),
            "cache_tokens": 131072,
            **{name: getattr(arguments, name) for name in ("dtype", "device", "threads", "runs", "engine")},
            "prefix_tokens": arguments.prefix_tokens,
            "question_tokens": arguments.question_tokens,
            "batch_new_tokens": arguments.batch_new_tokens,
        }
        results = {name: run(name, workload, arguments) for name in progress(arguments.systems, "engine")}
    write(arguments.json, vars(arguments), {"systems": results, "ratios": ratios(results)}, said(results))


def said(results: dict[str, dict[str, Any]]) -> str:
    """Return what was found, in a sentence for each system."""
    each = [
        f"{name}: first token after {row['warm_ttft_ms']:.0f} ms cached and {row['cold_ttft_ms']:.0f} ms cold, "
        f"{row['decode_tok_s']:.0f} tokens a second in a batch of {DECODE_ROWS}."
        if "cold_ttft_ms" in row
        else f"{name}: not measured, {row['not_measured']}."
        for name, row in results.items()
    ]
    return " ".join(each)


def described(model: str, directory: Path) -> dict[str, Any]:
    """Return the workload's part that is the model's; a random one's config is written into ``directory``."""
    if model.startswith(random_models.PREFIX):
        config = random_models.write_config(model.removeprefix(random_models.PREFIX), directory)
        path, vocab_size, longest = directory, config["vocab_size"], config["max_position_embeddings"]
    else:
        info = load_checkpoint_info(resolve_model(model))
        path, vocab_size, longest = info.path, info.vocab_size, info.max_model_len
    return {
        "model": str(path),
        "load_format": "dummy" if path == directory else "auto",
        "vocab_size": vocab_size,
        "max_model_len": min(longest, 16384),
    }


def run(name: str, workload: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one system; one that cannot run is named with the reason."""
    python = sys.executable
    # transformers' batching needs minutes for one long prompt on a CPU: measured once, said in the spread.
    on_cpu = workload["device"] == "cpu" or (workload["device"] == "auto" and not torch.cuda.is_available())
    prefix_runs = 1 if name == "transformers_cb" and on_cpu else workload["runs"]
    over_vllm = name == "warmpath" and workload["engine"] == "vllm"
    if name == "vllm_cpu" or over_vllm:
        python = arguments.vllm_python
        if not python:
            return {"not_measured": "no --vllm-python given; see benchmarks/peers/vllm_cpu.py"}
    done = subprocess.run(
        [python, "-m", WARMPATH_VLLM if over_vllm else MODULES[name]],
        input=json.dumps({**workload, "system": name, "prefix_runs": prefix_runs}),
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        return {"not_measured": f"its process ended with status {done.returncode}"}
    answer = json.loads(done.stdout)
    return {"version": answer["version"], **figures(answer["seconds"], workload, answer["facts"])}


def figures(seconds: dict[str, list[float]], workload: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """Turn seconds into the contract's figures: medians, with their spread; ``facts`` as the system gave them.

    Where it gave the memory-bandwidth limit of decoding, also how much of that was reached.
    """
    prompt = workload["prefix_tokens"] + workload["question_tokens"]
    cold, warm = spread(seconds["cold_s"]), spread(seconds["warm_s"])
    decode, batch = spread(seconds["decode_s"]), spread(seconds["batch_s"])
    decode_tok_s = DECODE_ROWS * DECODE_NEW_TOKENS / decode["p50"]
    limit = facts.get("decode_limit_tok_s")
    return {
        "cold_ttft_ms": 1000 * cold["p50"],
        "warm_ttft_ms": 1000 * warm["p50"],
        "prefill_tok_s": prompt / cold["p50"],
        "decode_tok_s": decode_tok_s,
        **({"decode_of_limit": decode_tok_s / limit} if limit else {}),
        "throughput_32x1024_tok_s": 32 * workload["batch_new_tokens"] / batch["p50"],
        "facts": facts,
        "spread_s": {"cold": cold, "warm": warm, "decode": decode, "batch": batch},
    }


def ratios(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return ours / theirs for every figure and every peer that was measured."""
    names = ("cold_ttft_ms", "warm_ttft_ms", "prefill_tok_s", "decode_tok_s", "throughput_32x1024_tok_s")
    ours = results.get("warmpath", {})
    return {
        peer: {name: ours[name] / theirs[name] for name in names}
        for peer, theirs in results.items()
        if peer != "warmpath" and names[0] in theirs and names[0] in ours
    }


if __name__ == "__main__":
    main()
