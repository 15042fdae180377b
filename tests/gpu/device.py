"""The GPU of the tests marked ``gpu``. `WARMPATH_TEST_DEVICE=cpu` rehearses them on the CPU, also in bfloat16."""

import os

import pytest
import torch


def gpu() -> torch.device:
    """Return the GPU, or the CPU in a rehearsal; skip the test if there is no GPU."""
    if os.environ.get("WARMPATH_TEST_DEVICE") == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda")
