"""Where vLLM's core computes on a CPU: in its own process, when it waits for a step. Imported by vLLM alone.

vLLM's choice there is a worker process, to bind its threads to cores, and a loop that takes one more core while it
waits for that process. Here no thread is bound: replicas share a machine's cores.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from vllm.v1.executor.uniproc_executor import UniProcExecutor


class InCore(UniProcExecutor):  # type: ignore[misc]
    """vLLM's executor of one process, but a step is computed when its result is asked for: vLLM times that."""

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Return a step's output; ``non_block``: its future."""
        compute = super().execute_model
        return _OnDemand(lambda: compute(scheduler_output)) if non_block else compute(scheduler_output)


class _OnDemand(Future):  # type: ignore[type-arg]
    """A future that computes its result when it is first asked for."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        super().__init__()
        self._compute = compute

    def result(self, timeout: float | None = None) -> Any:
        """Return or raise what ``compute`` did. ``timeout``: for nothing, it is computed by whoever asks."""
        if not self.done():
            try:
                self.set_result(self._compute())
            except Exception as error:
                self.set_exception(error)
        return super().result()
