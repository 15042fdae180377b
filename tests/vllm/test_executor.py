"""What computes in vLLM's core on a CPU."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.engine.vllm.executor import InCore


class Worker:
    """A worker that tells its steps."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    def execute_model(self, step: str) -> str:
        """Compute one."""
        self.steps.append(step)
        if step == "bad":
            raise RuntimeError("no memory")
        return f"{step} is done"


def test_a_step_is_computed_once_and_where_vllm_times_it() -> None:
    """vLLM takes the time that it waits for a step's future: prefill rates, and so routing, go by it."""
    executor: Any = object.__new__(InCore)
    executor.driver_worker = worker = Worker()
    assert executor.execute_model("first") == "first is done"
    later = executor.execute_model("second", non_block=True)
    assert worker.steps == ["first"]
    assert [later.result(), later.result()] == ["second is done", "second is done"]
    assert worker.steps == ["first", "second"]
    bad = executor.execute_model("bad", non_block=True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no memory"):
            bad.result()
    assert worker.steps == ["first", "second", "bad"]
