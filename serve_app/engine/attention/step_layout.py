"""A step as one packed row of T tokens: the order of its n sequences, and where each token's KV is written.

Built on the host once for all layers and all backends, which add plans of their own. Positions 0 to 20 of a sequence
with blocks [7, 3] of 16 have their KV in slots 112 to 127 and 48 to 52; slots 53 to 63 are stale.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from serve_app.engine.attention.paging import AttentionBackend, KvPool, PagedStep
from serve_app.engine.attention.upload import Array, upload
from serve_app.engine.step import BlockRun, Segment, ceil_div

PADDED_ROWS = 16
"""What a step of more than ``UNPADDED_ROWS`` tokens is padded to a multiple of: few shapes, few kernels compiled."""

UNPADDED_ROWS = 64


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Host arrays of int64; sequences in the packed order, ``order[i]`` is the number of the i-th one's segment.

    ``first_rows`` [n + 1]: sequence i has rows ``first_rows[i]`` to ``first_rows[i + 1]`` - 1. ``ends`` [n]: its tokens
    with KV, the new ones included. ``input_ids``, ``position_ids`` [T]; ``slots`` [T, less blank rows at the end].
    ``stale_slots``: what an earlier owner left after a sequence's end, in a block that the step begins.
    ``logit_rows``: rows whose token is wanted.
    """

    order: tuple[int, ...]
    segments: tuple[Segment, ...]
    first_rows: Array
    ends: Array
    input_ids: Array
    position_ids: Array
    slots: Array
    stale_slots: Array
    logit_rows: Array


def singles_first(segments: Sequence[Segment], *, by_length: bool = False) -> list[int]:
    """Return the segments' numbers, single tokens first. ``by_length``: then shorter contexts before longer ones."""
    return sorted(
        range(len(segments)), key=lambda i: (len(segments[i].token_ids) > 1, segments[i].end if by_length else 0)
    )


def lay_out(
    segments: Sequence[Segment], order: Sequence[int], block_size: int, *, blank_rows: bool = False
) -> StepLayout:
    """Lay ``segments`` out in ``order``.

    ``blank_rows``: pad a large step at its end by rows that are computed, written nowhere and ignored.
    """
    parts = [segments[i] for i in order]
    counts = np.array([len(part.token_ids) for part in parts], dtype=np.int64)
    ends = np.array([part.end for part in parts], dtype=np.int64)
    first_rows = np.append(0, np.cumsum(counts))
    tokens = int(first_rows[-1])
    owners = np.repeat(np.arange(len(parts)), counts)
    positions = np.arange(tokens) + (ends - first_rows[1:])[owners]
    blank = -tokens % PADDED_ROWS if blank_rows and tokens > UNPADDED_ROWS else 0
    ids = np.zeros(tokens + blank, dtype=np.int64)
    np.concatenate([part.token_ids for part in parts], out=ids[:tokens], casting="same_kind")
    return StepLayout(
        order=tuple(order),
        segments=tuple(parts),
        first_rows=first_rows,
        ends=ends,
        input_ids=ids,
        position_ids=np.append(positions, np.zeros(blank, dtype=np.int64)) if blank else positions,
        slots=_slots(parts, owners, positions, block_size),
        stale_slots=_stale_slots(parts, block_size),
        logit_rows=first_rows[1:][[part.sampling is not None for part in parts]] - 1,
    )


def upload_step(
    pool: KvPool, layout: StepLayout, backend: AttentionBackend, own: Sequence[Array] = ()
) -> tuple[PagedStep, list[torch.Tensor]]:
    """Return a step without its plan, and the arrays that its backend sends along; zeroes the stale slots.

    (Stale numbers are masked out, but a stale NaN would survive the mask.)
    """
    arrays = (layout.input_ids, layout.position_ids, layout.slots, layout.stale_slots, layout.logit_rows, *own)
    ids, positions, slots, stale, logit_rows, *theirs = upload(arrays, pool.tensor.device)
    if len(layout.stale_slots):
        pool.tensor.view(-1, pool.tensor.shape[2] * pool.block_size, *pool.tensor.shape[4:]).index_fill_(1, stale, 0)
    step = PagedStep(
        pool=pool,
        backend=backend,
        order=layout.order,
        input_ids=ids[None],
        position_ids=positions[None],
        slots=slots,
        logit_rows=logit_rows,
    )
    return step, theirs


def runs_of(segment: Segment, blocks: int) -> Iterator[BlockRun]:
    """Yield the runs of a segment's first ``blocks`` blocks."""
    for first, count in segment.runs:
        if blocks <= 0:
            return
        yield first, min(count, blocks)
        blocks -= count


def block_table(segment: Segment, tokens: int, block_size: int) -> Array:
    """Return the blocks of positions 0 to ``tokens`` - 1, int32; ``tokens`` is at least 1."""
    wanted = ceil_div(tokens, block_size)
    if len(segment.runs) > wanted // 16:
        # Short runs: reading the list costs less than an array for each of them.
        return np.array(segment.blocks[:wanted], dtype=np.int32)
    parts = [np.arange(first, first + count, dtype=np.int32) for first, count in runs_of(segment, wanted)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _slots(parts: Sequence[Segment], owners: Array, positions: Array, size: int) -> Array:
    """Return where each new token's KV is written; ``owners``: the number of its sequence in ``parts``."""
    firsts = [part.start // size for part in parts]
    written = [part.blocks[first : ceil_div(part.end, size)] for part, first in zip(parts, firsts, strict=True)]
    blocks = np.array(list(chain.from_iterable(written)), dtype=np.int64)
    before = np.cumsum([0, *map(len, written)])[:-1] - firsts
    slots: Array = blocks[before[owners] + positions // size] * size + positions % size
    return slots


def _stale_slots(parts: Sequence[Segment], size: int) -> Array:
    stale = [np.empty(0, dtype=np.int64)]
    for part in parts:
        offset = part.end % size
        if offset and part.start <= part.end - offset:
            slot = part.blocks[part.end // size] * size
            stale.append(np.arange(slot + offset, slot + size, dtype=np.int64))
    return np.concatenate(stale)
