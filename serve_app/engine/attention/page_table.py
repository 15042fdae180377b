"""Where each sequence of a step lies in the pool, as one table of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from serve_app.engine.attention.paging import AttentionBackend, KvPool, PagedStep
from serve_app.engine.attention.step_layout import (
    StepLayout,
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

    On the device, int32: ``lengths`` [n], tokens with KV, the new ones included; ``blocks`` [n, width]. On the host:
    ``rows`` and ``tokens``, counts of new tokens and of all; ``singles``: how many sequences have one row (they come
    first).
    """

    lengths: torch.Tensor
    blocks: torch.Tensor
    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    singles: int


def plan_pages(pool: KvPool, segments: Sequence[Segment], backend: AttentionBackend) -> PagedStep:
    """Return the step with a ``PageTable`` as its plan."""
    layout = lay_out(segments, singles_first(segments, by_length=True), pool.block_size)
    counts = np.diff(layout.first_rows)
    own = (layout.ends.astype(np.int32), _table(layout, pool))
    step, (lengths, blocks) = upload_step(pool, layout, backend, own)
    pages = PageTable(
        lengths=lengths,
        blocks=blocks,
        rows=tuple(counts.tolist()),
        tokens=tuple(layout.ends.tolist()),
        singles=int((counts == 1).sum()),
    )
    return replace(step, plan=pages)


def _table(layout: StepLayout, pool: KvPool) -> Array:
    """Return the block ids [n, width], int32; what lies beyond a sequence's own is its first block again."""
    width = ceil_div(int(layout.ends.max()), pool.block_size)
    table = np.full((len(layout.ends), width), pool.num_blocks, dtype=np.int32)
    for row, segment in enumerate(layout.segments):
        blocks = block_table(segment, segment.end, pool.block_size)
        table[row, : len(blocks)] = blocks
        table[row, len(blocks) :] = blocks[0]
    return table
