"""warmpath's own engine, measured as a peer is: in a process of its own, through `submit`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.workload import Prompt, serve
from router.block_hash import PrefixScope
from serve_app.engine.build import build_engine
from serve_app.engine.protocol import EngineOutput, EngineRequest, EngineSettings, SamplingParams

_SCOPE = PrefixScope("benchmark")
_ROOT = _SCOPE.root(b"a benchmark's secret")


class WarmpathEngine:
    """The engine without Ray or HTTP."""

    def __init__(self, workload: dict[str, Any]) -> None:
        settings = EngineSettings(
            num_blocks=workload["cache_tokens"] // 16,
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
        done = threading.Semaphore(0)
        errors: list[str] = []

        def sink(outputs: Sequence[EngineOutput]) -> None:
            for output in outputs:
                if output.finish_reason is not None:
                    errors.extend([output.error] if output.finish_reason == "error" else [])
                    done.release()

        for prompt in prompts:
            request = EngineRequest(
                request_id=str(next(self._numbers)),
                token_ids=np.asarray(prompt, dtype=np.int32),
                scope=_SCOPE,
                root=_ROOT,
                sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
            )
            self._engine.submit(request, sink)
        for _ in prompts:
            done.acquire()
        if errors:
            raise RuntimeError(errors[0])


if __name__ == "__main__":
    serve(WarmpathEngine, lambda: version("warmpath"))
