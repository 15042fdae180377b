"""What LoRA adapters cost: prefill and decode throughput with none, one and several of them mixed in one batch.

One engine, the same prompts; in every round the base model and each number of adapters are measured one after the
other, so that what else the machine does cancels. `python -m benchmarks lora --json FILE`
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.output_collector import OutputCollector
from benchmarks.common.paired import ratios
from benchmarks.common.random_adapters import make_adapters
from benchmarks.common.report import parser_of, progress, write
from benchmarks.common.running import running
from router.protocol.block_hash import PrefixScope
from serve_app.checkpoints.checkpoint import load_checkpoint_info
from serve_app.checkpoints.sources.resolve import resolve_model
from serve_app.engine.core.build import build_engine
from serve_app.engine.core.engine import TorchEngine
from serve_app.engine.protocol import AdapterSpec, EngineRequest, SamplingParams
from serve_app.engine.settings import EngineSettings

SECRET = b"lora benchmark"


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests at once; each request's adapter is the next of those in use."""

    sequences: int
    prefill_tokens: int
    decode_tokens: int


def main() -> None:
    """Parse flags, run, write the JSON."""
    parser = parser_of(__doc__, "small")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 1, 4], help="adapters in the batch")
    parser.add_argument("--runs", type=int, default=7, help="rounds, at least 5")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--prefill-tokens", type=int, default=256, help="prompt of each sequence")
    parser.add_argument("--decode-tokens", type=int, default=32, help="new tokens of each sequence")
    arguments = parser.parse_args()
    if arguments.runs < 5:
        parser.error("--runs must be at least 5: fewer say nothing")
    batch = Batch(arguments.sequences, arguments.prefill_tokens, arguments.decode_tokens)
    most = max(arguments.adapters)
    settings = EngineSettings(
        num_blocks=2 * batch.sequences * (2 + (batch.prefill_tokens + batch.decode_tokens) // 16),
        dtype=arguments.dtype,
        device=arguments.device,
        num_threads=arguments.threads,
        max_loras=max(1, most),
        max_cpu_loras=max(1, most),
        max_lora_rank=arguments.rank,
        enable_prefix_caching=False,
    )
    with tempfile.TemporaryDirectory(prefix="warmpath-lora-") as directory:
        model = resolve_model(arguments.model)
        specs = make_adapters(model, Path(directory), most, arguments.rank)
        engine = build_engine(model, settings, lambda _: None)
        with running(engine):
            vocab_size = load_checkpoint_info(model).vocab_size
            results = measure(engine, vocab_size, specs, arguments.adapters, batch, arguments.runs)
    each = "; ".join(
        f"{count}: prefill {row['prefill_throughput_ratio']:.2f}, decode {row['decode_throughput_ratio']:.2f}"
        for count, row in results.items()
    )
    said = f"Throughput against the base model with no adapter loaded, by adapters in the batch: {each}."
    write(arguments.json, vars(arguments), results, said)


def measure(
    engine: TorchEngine, vocab_size: int, specs: Sequence[AdapterSpec], counts: Sequence[int], batch: Batch, runs: int
) -> dict[str, Any]:
    """Return, by number of adapters in the batch, the throughput against the base model's with no adapter loaded.

    0 adapters: all are loaded and none is used.
    """
    sides: list[int | None] = [None, *counts]
    prefill: dict[int | None, list[float]] = {side: [] for side in sides}
    decode: dict[int | None, list[float]] = {side: [] for side in sides}
    for run in progress(range(-1, runs), "lora"):
        for turn in range(len(sides)):
            side = sides[(run + turn) % len(sides)]
            for spec in specs:
                if side is None:
                    engine.unload_adapter(spec.key)
                else:
                    engine.load_adapter(spec)
            keys = [spec.key for spec in specs[: side or 0]] or [""]
            prefill_s = _seconds(engine, vocab_size, keys, batch.sequences, batch.prefill_tokens, 1)
            # Prompts of one block: what is left is decoding.
            decode_s = _seconds(engine, vocab_size, keys, batch.sequences, 16, batch.decode_tokens)
            if run >= 0:  # The first round compiles kernels and counts for nothing.
                prefill[side].append(batch.sequences * batch.prefill_tokens / prefill_s)
                decode[side].append(batch.sequences * batch.decode_tokens / decode_s)
    return {
        str(count): {
            "prefill_throughput_ratio": (of_prefill := ratios(prefill[count], prefill[None]))["ratio"],
            "decode_throughput_ratio": (of_decode := ratios(decode[count], decode[None]))["ratio"],
            "details": {"unit": "tokens/s", "prefill": of_prefill, "decode": of_decode},
        }
        for count in counts
    }


def _seconds(
    engine: TorchEngine, vocab_size: int, keys: Sequence[str], sequences: int, prompt_tokens: int, new_tokens: int
) -> float:
    """Return how long a batch takes whose sequences have the adapters ``keys`` in turn ("": the base model)."""
    generator = np.random.default_rng(prompt_tokens)
    requests = []
    for number in range(sequences):
        scope = PrefixScope("lora benchmark", lora=keys[number % len(keys)])
        ids = generator.integers(300, vocab_size, prompt_tokens, dtype=np.int32)
        sampling = SamplingParams(new_tokens, temperature=0.0)
        requests.append(EngineRequest(str(number), ids, scope, scope.root(SECRET), sampling))
    return OutputCollector().answer_all(engine, requests)


if __name__ == "__main__":
    main()
