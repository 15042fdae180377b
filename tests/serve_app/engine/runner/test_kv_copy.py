"""Blocks out of a pool and back: what works on any device does what the CPU's own copy does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from serve_app.engine.runner.kv_copy import copy_in, copy_out, gather_blocks, scatter_blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gathered_copy_is_the_copy_block_by_block(device: torch.device, dtype: torch.dtype) -> None:
    here = torch.randn(3, 2, 9, 4, 2, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    there = here.clone().to(device)
    blocks = [7, 0, 4]
    rows = [np.empty(here[:, :, 0].nbytes, dtype=np.uint8) for _ in blocks]
    copy_out([here], blocks, rows)
    assert np.array_equal(gather_blocks(there, blocks), np.stack(rows))
    copy_in([here], [1, 2, 8], rows)
    scatter_blocks(there, [1, 2, 8], rows)
    assert torch.equal(there.cpu(), here)
