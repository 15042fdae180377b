"""Runs the step of vLLM's core on a CPU in its own process, when the core waits for it. Imported by vLLM alone.

vLLM's default binds a worker's threads to cores, which replicas share, and uses one more core to wait for it.
"""

from types import SimpleNamespace
from typing import Any

from vllm.v1.executor.uniproc_executor import AsyncOutputFuture, UniProcExecutor


class InCore(UniProcExecutor):  # type: ignore[misc]
    """vLLM's executor of one process, but it computes a step when its result is requested: vLLM times that."""

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Return a step's output; ``non_block``: its future."""
        compute = super().execute_model
        if not non_block:
            return compute(scheduler_output)
        return AsyncOutputFuture(SimpleNamespace(get_output=lambda: compute(scheduler_output)), single_value=True)
