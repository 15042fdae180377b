"""vLLM behind our engine's contract, measured as a peer is: what its events, sampling and our way through it take."""

from __future__ import annotations

import atexit
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.common.output_collector import OutputCollector
from benchmarks.peers.warmpath_engine import requests_of
from benchmarks.peers.workload import Prompt, serve
from serve_app.checkpoints.checkpoint import load_checkpoint_info
from serve_app.config.app import AppConfig
from serve_app.config.vllm import CPU_BLOCK_SIZE
from serve_app.replica.engine_factory import make_engine


class WarmpathVllm:
    """The engine without Ray or HTTP."""

    def __init__(self, workload: dict[str, Any]) -> None:
        config = AppConfig(
            model=workload["model"],
            engine="vllm",
            dtype=workload["dtype"],
            device=workload["device"],
            block_size=CPU_BLOCK_SIZE,
            num_blocks=workload["cache_tokens"] // CPU_BLOCK_SIZE,
            max_model_len=workload["max_model_len"],
            num_threads=workload["threads"],
        )
        self._engine = make_engine(config, load_checkpoint_info(Path(workload["model"])), lambda _: None)
        self._engine.start()
        atexit.register(self._engine.stop)  # ends vLLM's processes
        self._numbers = iter(range(1 << 40))

    def generate(self, prompts: list[Prompt], max_tokens: int) -> None:
        """Submit all prompts and wait for their last tokens. Raises RuntimeError when one fails."""
        OutputCollector().answer_all(self._engine, requests_of(prompts, max_tokens, self._numbers))


if __name__ == "__main__":
    serve(WarmpathVllm, lambda: version("warmpath"))
