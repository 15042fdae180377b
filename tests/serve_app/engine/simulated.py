"""Engines that compute nothing, over a runner with steps that can be held up or made to fail."""

import threading
from collections.abc import Callable, Sequence

from serve_app.engine.core.engine import TorchEngine
from serve_app.engine.runner.simulated_runner import CostModel, SimulatedRunner
from serve_app.engine.settings import EngineSettings
from serve_app.engine.step import Segment

MakeSimulated = Callable[..., TorchEngine]
"""The fixture ``make_simulated``."""


class GatedRunner(SimulatedRunner):
    """A simulated runner with steps that wait for a gate, and fail on a poisonous token."""

    def __init__(self, poison: int | None = None, gated: bool = False) -> None:
        cost = CostModel(prefill_tokens_per_s=1e9, decode_base_s=0.0, decode_per_sequence_s=0.0)
        super().__init__(cost, EngineSettings())
        self.poison = poison
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.steps: list[list[int]] = []
        if not gated:
            self.gate.set()

    def execute(self, segments: Sequence[Segment]) -> None:
        self.entered.set()
        assert self.gate.wait(30)
        self.steps.append([len(segment.token_ids) for segment in segments])
        if self.poison is not None and any(self.poison in segment.token_ids for segment in segments):
            raise RuntimeError("poison")
        super().execute(segments)
