"""Simulated engines for the engine's tests."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from router.protocol.block_hash import ChainHasher, hash_blocks
from serve_app.engine.core.engine import TorchEngine
from serve_app.engine.protocol import EventSink
from serve_app.engine.settings import STALL_AFTER_S, EngineSettings
from serve_app.engine.step import Runner
from tests.serve_app.engine.simulated import GatedRunner, MakeSimulated


@pytest.fixture
def make_simulated(engines: list[TorchEngine]) -> MakeSimulated:
    """Build a small engine that computes nothing. ``sink``: for cache events."""

    def make(
        runner: Runner | None = None,
        *,
        sink: EventSink = lambda _: None,
        start: bool = True,
        clock: Callable[[], float] = time.monotonic,
        stall_after_s: float = STALL_AFTER_S,
        hash_chain: ChainHasher = hash_blocks,
        **overrides: Any,
    ) -> TorchEngine:
        values = {"num_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64, **overrides}
        more: dict[str, Any] = {"clock": clock, "stall_after_s": stall_after_s, "hash_chain": hash_chain}
        engine = TorchEngine(runner or GatedRunner(), EngineSettings(**values), sink, **more)
        engines.append(engine)
        if start:
            engine.start()
        return engine

    return make
