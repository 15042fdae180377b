"""A step laid out for kernels that follow block tables: built on the host, sent to the device in one copy.

Owns the vectorised plan, the zeroing of fresh blocks in one kernel, and padding rows (they write to the pool's
scratch block). Knows nothing of which kernel follows. Segments flow in, a PagedStep with a PageTable flows out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from serve_app.engine.attention.paging import AttentionBackend, KvPool, PagedStep, PageTable
from serve_app.engine.step import Segment

_ALIGNMENT = 16
"""Every array starts at a multiple of this in the one that is copied: as its own dtype on the device needs it."""

Array = np.ndarray[Any, np.dtype[Any]]


def plan_pages(
    pool: KvPool, segments: Sequence[Segment], backend: AttentionBackend | None = None, rows: int = 0
) -> PagedStep:
    """Lay ``segments`` out, single tokens first, shorter contexts before longer ones.

    Zeroes the unused part of every block a segment begins. ``rows``: pad a step of single tokens to so many rows.
    Raises ValueError when a padded step is no step of single tokens, or does not fit.
    """
    size = pool.block_size
    order = sorted(range(len(segments)), key=lambda i: (len(segments[i].token_ids) > 1, segments[i].end))
    parts = [segments[i] for i in order]
    counts = np.array([len(part.token_ids) for part in parts], dtype=np.int64)
    starts = np.array([part.start for part in parts], dtype=np.int64)
    padding = max(rows - len(parts), 0)
    if rows and (len(parts) > rows or counts.max() > 1):
        raise ValueError(f"{len(parts)} sequences with up to {counts.max()} new tokens do not fit {rows} rows")
    if padding and pool.tensor.shape[2] == pool.num_blocks:
        raise ValueError("padding rows need a pool with a scratch block: they would write into somebody's")
    counts, starts = np.append(counts, np.ones(padding, np.int64)), np.append(starts, np.zeros(padding, np.int64))
    ends = starts + counts
    table = _table(pool, parts, ends)
    cu_rows = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=cu_rows[1:])
    owner = np.repeat(np.arange(len(counts)), counts)
    positions = starts[owner] + np.arange(cu_rows[-1]) - cu_rows[owner]
    ids = np.zeros(int(cu_rows[-1]), dtype=np.int64)
    np.concatenate([part.token_ids for part in parts], out=ids[: len(ids) - padding], casting="same_kind")
    last_rows = cu_rows[1 : len(parts) + 1] - 1
    arrays = (
        ids,
        positions,
        table[owner, positions // size] * np.int64(size) + positions % size,
        _stale_slots(parts, size),
        last_rows[[part.sampling is not None for part in parts]],
        cu_rows.astype(np.int32),
        ends.astype(np.int32),
        table,
    )
    on_device = upload(arrays, pool.tensor.device)
    if len(arrays[3]):
        pool.tensor.view(-1, pool.tensor.shape[2] * size, *pool.tensor.shape[4:]).index_fill_(1, on_device[3], 0)
    pages = PageTable(
        cu_rows=on_device[5],
        lengths=on_device[6],
        blocks=on_device[7],
        rows=tuple(counts.tolist()),
        tokens=tuple(ends.tolist()),
        singles=int((counts == 1).sum()),
        most_rows=int(counts.max()),
        most_tokens=int(ends.max()),
    )
    return PagedStep(
        pool=pool,
        order=tuple(order),
        input_ids=on_device[0][None],
        position_ids=on_device[1][None],
        slots=on_device[2],
        last_rows=tuple(last_rows.tolist()),
        backend=backend,
        pages=pages,
        logit_rows=on_device[4],
    )


def upload(arrays: Sequence[Array], device: torch.device) -> list[torch.Tensor]:
    """Return the arrays as tensors on ``device``; off the CPU by one copy that does not wait for the device."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return packed_upload(arrays, device, pin_memory=device.type == "cuda")


def packed_upload(arrays: Sequence[Array], device: torch.device, *, pin_memory: bool) -> list[torch.Tensor]:
    """Return the arrays as views of one byte tensor on ``device``.

    The pinned memory is torch's to reuse, which it does only after the copy.
    """
    starts, total = [], 0
    for array in arrays:
        starts.append(total)
        total += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    host = torch.empty(max(total, 1), dtype=torch.uint8, pin_memory=pin_memory)
    raw = host.numpy()
    for start, array in zip(starts, arrays, strict=True):
        raw[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    there = host.to(device, non_blocking=True)
    return [
        there[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]


def _table(pool: KvPool, parts: Sequence[Segment], ends: Array) -> Array:
    """Return the block ids [n, width], int32; what lies beyond a sequence's own is the first block of the table."""
    width = -(-int(ends.max()) // pool.block_size)
    table = np.zeros((len(ends), width), dtype=np.int32)
    table[len(parts) :] = pool.num_blocks
    for row, part in enumerate(parts):
        wanted, done = -(-part.end // pool.block_size), 0
        for first, count in part.runs:
            take = min(count, wanted - done)
            if take <= 0:
                break
            table[row, done : done + take] = np.arange(first, first + take, dtype=np.int32)
            done += take
        table[row, wanted:] = table[row, 0]
    return table


def _stale_slots(parts: Sequence[Segment], size: int) -> Array:
    """Return the slots after a sequence's end in blocks that its segment begins: an earlier owner's numbers."""
    stale = [np.empty(0, dtype=np.int64)]
    for part in parts:
        offset = part.end % size
        if offset and part.start <= part.end - offset:
            slot = part.blocks[part.end // size] * size
            stale.append(np.arange(slot + offset, slot + size, dtype=np.int64))
    return np.concatenate(stale)
