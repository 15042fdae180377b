"""warmpath's own engine, measured as a peer is: in a process of its own, through `submit`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.output_collector import OutputCollector
from benchmarks.peers.bandwidth import copy_bytes_per_s, decode_limit_tok_s, weight_bytes_read
from benchmarks.peers.workload import DECODE_NEW_TOKENS, DECODE_PROMPT_TOKENS, DECODE_ROWS, Prompt, serve
from router.protocol.block_hash import PrefixScope
from serve_app.engine.core.build import load_runner
from serve_app.engine.core.engine import TorchEngine
from serve_app.engine.protocol import EngineRequest, SamplingParams
from serve_app.engine.runner.model_runner import ModelRunner
from serve_app.engine.settings import EngineSettings

_SCOPE = PrefixScope("benchmark")
_ROOT = _SCOPE.root(b"a benchmark's secret")

COPY_BYTES = 2 * 1024**3
"""Far more than any cache between the device's memory and its processors holds."""


class WarmpathEngine:
    """The engine without Ray or HTTP."""

    def __init__(self, workload: dict[str, Any]) -> None:
        settings = EngineSettings(
            num_blocks=workload["cache_tokens"] // 16,
            max_model_len=workload["max_model_len"],
            dtype=workload["dtype"],
            device=workload["device"],
            load_format=workload["load_format"],
            num_threads=workload["threads"],
        )
        self._runner = load_runner(Path(workload["model"]), settings)
        self._engine = TorchEngine(self._runner, settings, lambda _: None)
        self._engine.start()
        self._numbers = iter(range(1 << 40))

    def generate(self, prompts: list[Prompt], max_tokens: int) -> None:
        """Submit all prompts and wait for their last tokens. Raises RuntimeError when one fails."""
        OutputCollector().answer_all(self._engine, requests_of(prompts, max_tokens, self._numbers))

    def facts(self) -> dict[str, Any]:
        """Return how the model was run and, on a GPU, the memory-bandwidth limit of the decode figure."""
        runner = self._runner
        assert isinstance(runner, ModelRunner)
        shown = {name: value for name, _, value in runner.samples(())}
        facts: dict[str, Any] = {
            "attention_backend": runner.attention.backend.name,
            "refused_backends": dict(runner.attention.refused),
            "decode_graphs": shown["warmpath_decode_graphs"],
        }
        if runner.device.type == "cuda":
            facts |= bandwidth_limit(runner, COPY_BYTES)
        return facts


def requests_of(prompts: list[Prompt], max_tokens: int, numbers: Iterator[int]) -> list[EngineRequest]:
    """Return greedy requests, called by the next ``numbers``."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return [
        EngineRequest(str(next(numbers)), np.asarray(prompt, dtype=np.int32), _SCOPE, _ROOT, sampling)
        for prompt in prompts
    ]


def bandwidth_limit(runner: ModelRunner, copy_bytes: int) -> dict[str, float]:
    """Return what a decode step reads, how fast a copy of ``copy_bytes`` is, and the tokens a second of both."""
    sizes: dict[str, float] = {
        "copy_bytes_per_s": copy_bytes_per_s(runner.device, copy_bytes),
        "weight_bytes": weight_bytes_read(runner.model),
        "kv_bytes_per_token": runner.block_bytes / runner.pool.block_size,
        "context_tokens": DECODE_PROMPT_TOKENS + DECODE_NEW_TOKENS / 2,
    }
    return {**sizes, "decode_limit_tok_s": decode_limit_tok_s(**sizes, rows=DECODE_ROWS)}  # type: ignore[arg-type]


if __name__ == "__main__":
    serve(WarmpathEngine, lambda: version("warmpath"), WarmpathEngine.facts)
