"""One instance for all modules of this folder: slow replicas with little room, to have time to kill them in."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks.common.server import instance
from serve_app.checkpoints.demo_model import ensure_demo_model
from tests.integration.conftest import alone


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model in a directory of its own: while that is away, no replica can start."""
    return shutil.copytree(ensure_demo_model("demo"), tmp_path_factory.mktemp("models") / "demo")


@pytest.fixture(scope="package")
def flags(model: Path) -> Sequence[str]:
    """Two replicas of 2,000 tokens/s; bursts find running sequences, a waiting line, and refusals."""
    settings = {
        "simulated_prefill_tokens_per_s": 2000,
        "simulated_decode_step_s": 0.02,
        "max_model_len": 32768,
        "max_num_seqs": 8,
        "max_waiting_requests": 8,
        "max_queued_requests": 8,
        "no_replica_wait_s": 0.2,
    }
    pairs = (f"--set={name}={value}" for name, value in settings.items())
    return ["--model", str(model), "--engine", "simulated", *pairs]


@pytest.fixture(scope="package")
def url(flags: Sequence[str]) -> Iterator[str]:
    with alone(instance(*flags)) as base:
        yield base
