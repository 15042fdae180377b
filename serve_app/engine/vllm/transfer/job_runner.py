"""Jobs as requests of one token, which vLLM places as any other, before whatever else waits. Imports no vllm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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
        """Wait for a job's end; see ``transfer.RunJob``."""
        if lora:
            self._slots.pin(lora)
        try:
            weights = self._slots.weights(lora).request if lora else None
            self._begins()
            return self._frontend.call(self._run(job, list(token_ids), root, weights)).result()
        except (LookupError, EngineError):
            raise
        except Exception as error:
            raise EngineError(f"vLLM could not copy KV: {type(error).__name__}") from error
        finally:
            if lora:
                self._slots.unpin(lora)

    async def _run(self, job: Job, token_ids: list[int], root: bytes, lora: Any) -> int:
        asked = {**_SAMPLING, "extra_args": job.to_extra_args()}
        name, cached = f"{Path(job.file).name}-{job.kind}", 0
        async for part in self._frontend.generate(name, token_ids, root.hex(), asked, lora, priority=_FIRST):
            cached = max(cached, part.cached_tokens)
        return cached
