"""warmpath's own engine, measured as a peer is: in a process of its own, through `submit`."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.output_collector import OutputCollector
from benchmarks.peers.workload import Prompt, serve
from router.protocol.block_hash import PrefixScope
from serve_app.engine.core.build import build_engine
from serve_app.engine.protocol import EngineRequest, SamplingParams
from serve_app.engine.settings import EngineSettings

_SCOPE = PrefixScope("benchmark")
_ROOT = _SCOPE.root(b"a benchmark's secret")


class WarmpathEngine:
    """The engine without Ray or HTTP."""

    def __init__(self, workload: dict[str, Any]) -> None:
        settings = EngineSettings(
            block_size=workload["block_size"],
            num_blocks=workload["cache_tokens"] // workload["block_size"],
            max_model_len=workload["max_model_len"],
            dtype=workload["dtype"],
            device=workload["device"],
            num_threads=workload["threads"],
        )
        self._engine = build_engine(Path(workload["model"]), settings, lambda _: None)
        self._engine.start()
        self._numbers = iter(range(1 << 40))

    def generate(self, prompts: list[Prompt], max_tokens: int) -> None:
        """Submit all prompts and wait for their last tokens. Raises RuntimeError when one fails."""
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        requests = [
            EngineRequest(str(next(self._numbers)), np.asarray(prompt, dtype=np.int32), _SCOPE, _ROOT, sampling)
            for prompt in prompts
        ]
        OutputCollector().answer_all(self._engine, requests)


if __name__ == "__main__":
    serve(WarmpathEngine, lambda: version("warmpath-serve"))
