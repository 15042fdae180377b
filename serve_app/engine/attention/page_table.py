"""The plan of kernels that follow block tables.

Where a step is padded, each padding row is a sequence of one token in the pool's scratch block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from serve_app.engine.attention.paging import AttentionBackend, KvPool, PagedStep
from serve_app.engine.attention.step_layout import (
    StepLayout,
    add_scratch_rows,
    block_table,
    lay_out,
    singles_first,
    upload_step,
)
from serve_app.engine.attention.upload import Array
from serve_app.engine.step import Segment, ceil_div


@dataclass(frozen=True, slots=True)
class PageTable:
    """Where each sequence of a step lies. Sequences are in the step's order.

    On the device, int32: ``cu_rows`` [n + 1], sequence i has rows ``cu_rows[i]`` to ``cu_rows[i + 1]`` - 1;
    ``lengths`` [n], tokens with KV, the new ones included; ``blocks`` [n, width]. On the host: ``rows`` and
    ``tokens``, the same counts; ``singles``, how many sequences have one row (they come first); the largest of
    both counts. In a captured graph the host's counts are bounds only.
    """

    cu_rows: torch.Tensor
    lengths: torch.Tensor
    blocks: torch.Tensor
    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    singles: int
    most_rows: int
    most_tokens: int


def plan_pages(pool: KvPool, segments: Sequence[Segment], backend: AttentionBackend, rows: int = 0) -> PagedStep:
    """Return the step with a ``PageTable`` as its plan. ``rows``: pad a step of single tokens to this many rows.

    Raises ValueError when a padded step is no step of single tokens, or does not fit.
    """
    layout = lay_out(segments, singles_first(segments, by_length=True), pool.block_size)
    if rows:
        layout = _padded(layout, rows, pool)
    counts = np.diff(layout.first_rows)
    own = (layout.first_rows.astype(np.int32), layout.ends.astype(np.int32), _table(layout, pool))
    step, (cu_rows, lengths, blocks) = upload_step(pool, layout, backend, own)
    pages = PageTable(
        cu_rows=cu_rows,
        lengths=lengths,
        blocks=blocks,
        rows=tuple(counts.tolist()),
        tokens=tuple(layout.ends.tolist()),
        singles=int((counts == 1).sum()),
        most_rows=int(counts.max()),
        most_tokens=int(layout.ends.max()),
    )
    return replace(step, plan=pages)


def _padded(layout: StepLayout, rows: int, pool: KvPool) -> StepLayout:
    sequences, most = len(layout.segments), int(np.diff(layout.first_rows).max())
    if sequences > rows or most > 1:
        raise ValueError(f"{sequences} sequences with up to {most} new tokens do not fit {rows} rows")
    if sequences < rows and pool.tensor.shape[2] == pool.num_blocks:
        raise ValueError("padding rows need a pool with a scratch block: they would write into somebody's")
    return add_scratch_rows(layout, rows, pool.num_blocks * pool.block_size)


def _table(layout: StepLayout, pool: KvPool) -> Array:
    """Return the block ids [n, width], int32; what lies beyond a sequence's own is its first block again."""
    width = ceil_div(int(layout.ends.max()), pool.block_size)
    table = np.full((len(layout.ends), width), pool.num_blocks, dtype=np.int32)
    for row, segment in enumerate(layout.segments):
        blocks = block_table(segment, segment.end, pool.block_size)
        table[row, : len(blocks)] = blocks
        table[row, len(blocks) :] = blocks[0]
    return table
