"""What a token costs in a replica beside the model, counted in calls, which no other load on the machine changes.

From the choice of a step to the message for an ingress, with 32 answers in each step.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from types import FrameType
from typing import Any

import numpy as np

from router.protocol.block_hash import PrefixScope, hash_blocks
from serve_app.engine.core.engine import TorchEngine
from serve_app.engine.protocol import EngineOutput, EngineRequest, ReplyTo, SamplingParams, to_wire
from serve_app.engine.runner.simulated_runner import CostModel, SimulatedRunner
from serve_app.engine.settings import EngineSettings
from serve_app.replica.running_calls import RunningCalls

MOST_PYTHON, MOST_C = 16.0, 19.0
"""Calls a token. Lower them with each gain."""
ANSWERS, STEPS = 32, 64
SCOPE = PrefixScope("m")
ROOT = SCOPE.root(b"s")


class Messages:
    """What a sender writes; ``count``: tokens in it."""

    count = 0

    def send(self, to: ReplyTo, outputs: Sequence[EngineOutput]) -> bool:
        self.count += len(outputs)
        return bool(to_wire(outputs))


def request(number: int) -> EngineRequest:
    ids = np.random.default_rng(number).integers(0, 2000, 40).astype(np.int32)
    return EngineRequest(
        request_id=f"r{number}", token_ids=ids, block_hashes=hash_blocks(ROOT, ids, 16), scope=SCOPE, root=ROOT,
        placement_key=b"k" * 16, tenant="acme", sampling=SamplingParams(max_tokens=900),
        reply_to=ReplyTo("tcp://127.0.0.1:1", "key"),
    )  # fmt: skip


def test_a_token_takes_few_calls() -> None:
    """In steps that only decode."""
    asyncio.run(_count())


async def _count() -> None:
    settings = EngineSettings(num_blocks=20_000)
    cost = CostModel(prefill_tokens_per_s=1e9, decode_base_s=0.0)
    engine = TorchEngine(SimulatedRunner(cost, settings), settings, lambda _: None)
    sender = Messages()
    calls = RunningCalls(sender, lambda _: None)  # type: ignore[arg-type]
    for number in range(ANSWERS):
        calls.begin(request(number))
        engine.submit(request(number), calls.deliver)
    while sender.count < 8 * ANSWERS:
        engine.take_in()
        engine.step()
    counts: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if "/tests/" not in frame.f_code.co_filename:
            counts[event] += 1

    before = sender.count
    sys.setprofile(count)
    try:
        for _ in range(STEPS):
            engine.take_in()
            engine.step()
    finally:
        sys.setprofile(None)
    tokens = sender.count - before
    assert tokens == STEPS * ANSWERS
    taken = {event: counts[event] / tokens for event in ("call", "c_call")}
    assert 1.0 < taken["call"] <= MOST_PYTHON, taken
    assert 1.0 < taken["c_call"] <= MOST_C, taken
    engine.stop()
