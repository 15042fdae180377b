"""Blocks out of pool tensors and back, as raw bytes: a base model's, and a drafter's after it.

On the CPU a numpy copy per block is three times as fast as torch's gather and wakes no OpenMP workers.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from serve_app.cache.kv_chain import KvPart, Row


def kv_part(pool: torch.Tensor, model: str = "") -> KvPart:
    """Describe what a block of ``pool`` carries."""
    layers, pair, _, *rest = pool.shape
    return KvPart(str(pool.dtype).removeprefix("torch."), (layers, pair, *rest), model)


def copy_out(pools: Sequence[torch.Tensor], blocks: Sequence[int], rows: Sequence[Row]) -> None:
    """Fill each row with its block of every pool [layers, planes, blocks, ...], one after another."""
    for pool, parts in _row_parts(pools, rows):
        if pool.device.type == "cpu":
            raw = pool.view(torch.uint8).numpy()
            for block, part in zip(blocks, parts, strict=True):
                there = raw[:, :, block]
                part.reshape(there.shape)[...] = there
        else:
            for part, taken in zip(parts, gather_blocks(pool, blocks), strict=True):
                part[...] = taken


def copy_in(pools: Sequence[torch.Tensor], blocks: Sequence[int], rows: Sequence[Row]) -> None:
    """Fill blocks of every pool from rows; mutates the pools."""
    for pool, parts in _row_parts(pools, rows):
        if pool.device.type == "cpu":
            raw = pool.view(torch.uint8).numpy()
            for block, part in zip(blocks, parts, strict=True):
                there = raw[:, :, block]
                there[...] = part.reshape(there.shape)
        else:
            scatter_blocks(pool, blocks, parts)


def _row_parts(pools: Sequence[torch.Tensor], rows: Sequence[Row]) -> Iterator[tuple[torch.Tensor, list[Row]]]:
    """Yield each pool with its part of every row."""
    start = 0
    for pool in pools:
        end = start + pool[:, :, 0].nbytes
        yield pool, [row[start:end] for row in rows]
        start = end


def gather_blocks(pool: torch.Tensor, blocks: Sequence[int]) -> Row:
    """Return blocks of a pool on any device as bytes [len(blocks), bytes per block]."""
    gathered = pool.index_select(2, torch.tensor(blocks, device=pool.device)).movedim(2, 0)
    return gathered.contiguous().view(torch.uint8).view(len(blocks), -1).cpu().numpy()


def scatter_blocks(pool: torch.Tensor, blocks: Sequence[int], rows: Sequence[Row]) -> None:
    """Fill blocks of a pool on any device; mutates it."""
    layers, planes, _, *rest = pool.shape
    there = torch.from_numpy(np.stack(rows)).to(pool.device).view(pool.dtype).view(len(blocks), layers, planes, *rest)
    pool.index_copy_(2, torch.tensor(blocks, device=pool.device), there.movedim(0, 2))
