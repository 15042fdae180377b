"""Rules of the cost model, and the notices of everything that used it."""

import numpy as np
import pytest

from benchmarks.common.virtual_clock import VirtualClock
from serve_app.engine.core.engine import TorchEngine
from serve_app.engine.protocol import SamplingParams
from serve_app.engine.runner.simulated_runner import CostModel, SimulatedRunner
from serve_app.engine.settings import EngineSettings
from serve_app.engine.step import Segment
from tests.serve_app.engine.tiny import Collector, prompt, request


def test_a_request_takes_the_modelled_time() -> None:
    """On a virtual clock: 1,000 tokens at 5,000 a second, then three decode steps of 10 ms + 1 ms."""
    clock = VirtualClock()
    cost = CostModel(prefill_tokens_per_s=5000.0, decode_base_s=0.010, decode_per_sequence_s=0.001)
    settings = EngineSettings(num_blocks=128)
    runner = SimulatedRunner(cost, settings, sleep=clock.sleep)
    engine = TorchEngine(runner, settings, lambda _: None, clock=clock)
    collector = Collector()
    engine.submit(request("r", prompt(1000), 4), collector)
    engine.start()
    collector.wait(["r"])
    assert clock() == pytest.approx(0.2 + 3 * 0.011)
    assert engine.load().prefill_tokens_per_s == pytest.approx(5000.0)
    engine.stop()
    samples = engine.stats().samples
    assert {name: value for name, _, value in samples}["warmpath_decode_step_seconds"] == pytest.approx(0.011)
    assert all(dict(labels)["engine"] == "simulated" for _, labels, _ in samples)


def test_tokens_are_deterministic_and_avoid_stop_tokens() -> None:
    cost = CostModel(vocab_size=4)
    runner = SimulatedRunner(cost, EngineSettings(), sleep=lambda _: None)

    def tokens(stop: tuple[int, ...]) -> list[int | None]:
        params = SamplingParams(9, seed=3, stop_token_ids=stop)
        ids = np.array([1], dtype=np.int32)
        segments = [Segment(ids, p, [0], [(0, 1)], params) for p in range(40)]
        for segment in segments:
            runner.execute([segment])
        return [segment.token for segment in segments]

    assert tokens(()) == tokens(())
    assert set(tokens(())) == {0, 1, 2, 3}
    assert set(tokens((0, 2))) == {1, 3}
