"""Tests of both engines on a GPU: `make test-gpu`. Without a GPU they are skipped, and nothing starts."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

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


@pytest.fixture(scope="module")
def both(device: str, demo_model_path: Path) -> Iterator[Both]:
    """The demo model in bfloat16 on either engine, beside each other; vLLM starts once, without compilation.

    The first logprobs wait for a kernel that is compiled all the same.
    """
    sizes = {"block_size": BLOCK} if device == "cpu" else {"block_size": GPU_BLOCK, "gpu_memory_utilization": 0.5}
    with both_engines(demo_model_path, device=device, dtype="bfloat16", **sizes) as running:
        outputs_of(running.vllm, request("first", running.prompt(10, seed=1000), 1, logprobs=0))
        yield running


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            # vLLM and its imports emit warnings of their own.
            item.add_marker(pytest.mark.filterwarnings("default"))
