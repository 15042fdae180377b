"""Tests of both engines on a GPU: `make test-gpu`. Without a GPU they are skipped, and nothing starts."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.device import gpu
from tests.serve_app.engine.tiny import request
from tests.vllm.engines import BLOCK, Both, both_engines, outputs_of

GPU_BLOCK = 16
"""vLLM's and our default on a GPU; its CPU kernels need ``BLOCK``."""


@pytest.fixture(scope="module")
def device() -> str:
    """Where both engines run; skips the tests before anything is made for them."""
    kind = gpu().type
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    return kind


def sizes_on(device: str, part: float) -> dict[str, Any]:
    """Return vLLM's block size on a device, and on a GPU the ``part`` of its memory that it gets."""
    return {"block_size": BLOCK} if device == "cpu" else {"block_size": GPU_BLOCK, "gpu_memory_utilization": part}


@pytest.fixture(scope="module")
def both(device: str, demo_model_path: Path) -> Iterator[Both]:
    """The demo model in bfloat16 on either engine, beside each other; vLLM starts without compilation.

    Both draw by (seed, position), so that they can be compared. The first logprobs wait for a kernel that is compiled
    all the same.
    """
    sizes = sizes_on(device, 0.4)
    with both_engines(demo_model_path, device=device, dtype="bfloat16", exact_resume="on", **sizes) as running:
        outputs_of(running.vllm, request("first", running.prompt(10, seed=1000), 1, logprobs=0))
        yield running


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            # vLLM and its imports emit warnings of their own.
            item.add_marker(pytest.mark.filterwarnings("default"))
