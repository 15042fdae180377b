"""Jobs as requests of one token, which vLLM places as any other; copies before whatever else waits. Imports no vllm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from serve_app.engine.protocol import EngineError
from serve_app.engine.vllm.adapters import VllmAdapters
from serve_app.engine.vllm.frontend import VllmFrontend
from serve_app.engine.vllm.transfer.job import Job

_FIRST = -1
"""vLLM's priority of a job; requests have 0. A copy costs a step's part, and whoever waits for it has a deadline."""

_SAMPLING = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True, "detokenize": False, "logprobs": None}


class JobRunner:
    """Runs jobs in vLLM. ``begins`` is called before each (any thread): its one token is nobody's prompt."""

    def __init__(self, frontend: VllmFrontend, adapters: VllmAdapters, begins: Callable[[], None]) -> None:
        self._frontend = frontend
        self._slots = adapters.slots
        self._begins = begins

    def __call__(self, job: Job, token_ids: Sequence[int], root: bytes, lora: str) -> int:
        """Wait for a job's end (any thread but the loop's); see ``transfer.RunJob``."""
        return self._frontend.call(self.run(job, token_ids, root, lora)).result()

    async def run(self, job: Job, token_ids: Sequence[int], root: bytes, lora: str) -> int:
        """Run a job in the loop of ``frontend``; returns and raises as ``__call__``."""
        if lora:
            self._slots.pin(lora)
        try:
            weights = self._slots.weights(lora).request if lora else None
            self._begins()
            asked = {**_SAMPLING, "extra_args": job.to_extra_args()}
            name, cached = f"{Path(job.file).name}-{job.kind}", 0
            priority = 0 if job.kind == "pin" else _FIRST  # what is to be kept may have to be computed
            parts = self._frontend.generate(name, list(token_ids), root.hex(), asked, weights, priority=priority)
            async for part in parts:
                cached = max(cached, part.cached_tokens)
            return cached
        except (LookupError, EngineError):
            raise
        except Exception as error:
            raise EngineError(f"vLLM could not copy KV: {type(error).__name__}") from error
        finally:
            if lora:
                self._slots.unpin(lora)
