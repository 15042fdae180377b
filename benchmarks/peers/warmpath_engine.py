"""warmpath's engines, the built-in one or vLLM's, measured like a peer: in a separate process, through `submit`."""

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.output_collector import OutputCollector
from benchmarks.peers.workload import TokenPrompt, serve
from router import __version__
from router.protocol.block_hash import PrefixScope
from serve_app.checkpoints.checkpoint import load_checkpoint_info
from serve_app.config.app import AppConfig
from serve_app.engine.protocol import EngineRequest, SamplingParams
from serve_app.replica.engine_factory import make_engine

_SCOPE = PrefixScope("benchmark")
_ROOT = _SCOPE.root(b"a benchmark's secret")


class WarmpathEngine:
    """The engine without Ray or HTTP."""

    def __init__(self, workload: dict[str, Any]) -> None:
        self._engine = make_engine(config_of(workload), load_checkpoint_info(Path(workload["model"])), lambda _: None)
        self._engine.start()
        self._numbers = iter(range(1 << 40))

    def generate(self, prompts: list[TokenPrompt], max_tokens: int) -> None:
        """Submit all prompts and wait for their last tokens. Raises RuntimeError if one fails."""
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        requests = [
            EngineRequest(
                str(next(self._numbers)),
                token_ids=np.asarray(prompt, dtype=np.int32),
                scope=_SCOPE,
                root=_ROOT,
                sampling=sampling,
            )
            for prompt in prompts
        ]
        OutputCollector().answer_all(self._engine, requests)


def config_of(workload: dict[str, Any]) -> AppConfig:
    """Return the settings of a workload's engine."""
    return AppConfig(
        engine="vllm" if workload["system"] == "warmpath_vllm" else "torch",
        block_size=workload["block_size"],
        num_blocks=workload["cache_tokens"] // workload["block_size"],
        max_model_len=workload["max_model_len"],
        dtype=workload["dtype"],
        device=workload["device"],
        replica_num_gpus=1 if workload["device"] == "cuda" else 0,
        num_threads=workload["threads"],
        engine_args={"load_format": workload["load_format"]} if "load_format" in workload else {},
    )


if __name__ == "__main__":
    serve(WarmpathEngine, lambda: __version__)
