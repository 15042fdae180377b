"""Copy blocks out of a pool's tensor and back, as raw bytes.

On the CPU a numpy copy per block is three times as fast as torch's gather and wakes no OpenMP workers.
"""

from collections.abc import Sequence

import numpy as np
import torch

from serve_app.cache.kv_chain import KvPart, Row


def kv_part(pool: torch.Tensor) -> KvPart:
    """Describe the content of a block of ``pool``."""
    layers, pair, _, *rest = pool.shape
    return KvPart(str(pool.dtype).removeprefix("torch."), (layers, pair, *rest))


def copy_out(pool: torch.Tensor, blocks: Sequence[int], rows: Sequence[Row]) -> None:
    """Fill each row with its block of the pool [layers, planes, blocks, ...]."""
    if pool.device.type == "cpu":
        raw = pool.view(torch.uint8).numpy()
        for block, row in zip(blocks, rows, strict=True):
            there = raw[:, :, block]
            row.reshape(there.shape)[...] = there
    else:
        for row, taken in zip(rows, gather_blocks(pool, blocks), strict=True):
            row[...] = taken


def copy_in(pool: torch.Tensor, blocks: Sequence[int], rows: Sequence[Row]) -> None:
    """Fill blocks of the pool from rows; mutates it."""
    if pool.device.type == "cpu":
        raw = pool.view(torch.uint8).numpy()
        for block, row in zip(blocks, rows, strict=True):
            there = raw[:, :, block]
            there[...] = row.reshape(there.shape)
    else:
        scatter_blocks(pool, blocks, rows)


def gather_blocks(pool: torch.Tensor, blocks: Sequence[int]) -> Row:
    """Return blocks of a pool on any device as bytes [len(blocks), bytes per block]."""
    gathered = pool.index_select(2, torch.tensor(blocks, device=pool.device)).movedim(2, 0)
    return gathered.contiguous().view(torch.uint8).view(len(blocks), -1).cpu().numpy()


def scatter_blocks(pool: torch.Tensor, blocks: Sequence[int], rows: Sequence[Row]) -> None:
    """Fill blocks of a pool on any device; mutates it."""
    layers, planes, _, *rest = pool.shape
    there = torch.from_numpy(np.stack(rows)).to(pool.device).view(pool.dtype).view(len(blocks), layers, planes, *rest)
    pool.index_copy_(2, torch.tensor(blocks, device=pool.device), there.movedim(0, 2))
