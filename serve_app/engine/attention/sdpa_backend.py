"""The attention backend that runs wherever torch runs: a step's KV is copied into padded batches, bounded in size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from serve_app.engine.attention.paging import KvPool, PagedStep, write_kv
from serve_app.engine.attention.step_layout import StepLayout, block_table, lay_out, singles_first, upload_step
from serve_app.engine.attention.upload import Array
from serve_app.engine.step import Segment, ceil_div

GATHER_TOKENS = 128 * 1024
"""Tokens copied at once, unless one sequence has more: 512 MiB for 8 heads of 128 in bfloat16."""

MASK_ENTRIES = 32 * 1024 * 1024
"""Rows times tokens of one mask of a chunk that continues a sequence."""


@dataclass(frozen=True, slots=True)
class _Pages:
    """Where the n sequences of a step lie, in its order: ``rows`` new tokens of ``tokens`` each, on the host.

    On the device, int32: ``lengths`` [n], the same as ``tokens``; ``blocks`` [n, width]. The first ``singles``
    sequences have one row.
    """

    lengths: torch.Tensor
    blocks: torch.Tensor
    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    singles: int


@dataclass(frozen=True, slots=True)
class _PaddedRows:
    """Single-token rows ``first`` to ``last`` - 1; ``blocks`` [rows * width], ``mask`` [rows, 1, 1, width * size]."""

    first: int
    last: int
    blocks: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Rows ``first`` to ``last`` - 1 of one sequence of ``tokens``. ``masks``: (first row, last row, mask) in it.

    Without a mask rows and tokens are equally many and the usual triangle is meant.
    """

    first: int
    last: int
    tokens: int
    blocks: torch.Tensor
    masks: tuple[tuple[int, int, torch.Tensor | None], ...]


class SdpaBackend:
    """Copies KV for torch's own ``scaled_dot_product_attention``."""

    name = "sdpa"

    def plan(self, pool: KvPool, segments: Sequence[Segment]) -> PagedStep:
        """Plan a step; see ``AttentionBackend``."""
        layout = lay_out(segments, singles_first(segments, by_length=True), pool.block_size)
        step, (lengths, blocks) = upload_step(pool, layout, self, (layout.ends.astype(np.int32), _table(layout, pool)))
        rows = tuple(np.diff(layout.first_rows).tolist())
        pages = _Pages(lengths, blocks, rows, tuple(layout.ends.tolist()), rows.count(1))
        padded = _padded_rows(pages, pool.block_size, pool.tensor.dtype)
        return replace(step, plan=[*padded, *_chunks(pages, pool.block_size)])

    def attend(
        self, step: PagedStep, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Write ``key`` and ``value``, attend ``query``; see ``AttentionBackend``."""
        write_kv(step, layer, key, value)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        jobs: list[_PaddedRows | _Chunk] = step.plan
        for job in jobs:
            if isinstance(job, _PaddedRows):
                _attend_rows(step.pool, layer, job, query, output, scale)
            else:
                _attend_chunk(step.pool, layer, job, query, output, scale)
        return output


def _table(layout: StepLayout, pool: KvPool) -> Array:
    """Return the block ids [n, width], int32; what lies beyond a sequence's own is its first block again."""
    table = np.empty((len(layout.segments), ceil_div(int(layout.ends.max()), pool.block_size)), dtype=np.int32)
    for row, segment in enumerate(layout.segments):
        blocks = block_table(segment, segment.end, pool.block_size)
        table[row, : len(blocks)] = blocks
        table[row, len(blocks) :] = blocks[0]
    return table


def _padded_rows(pages: _Pages, size: int, dtype: torch.dtype) -> list[_PaddedRows]:
    """Group rows of like length (they are sorted), so that padding at most doubles what is copied."""
    jobs: list[_PaddedRows] = []
    first = 0
    while first < pages.singles:
        room = 2 * max(pages.tokens[first], 16 * size)
        last = first + 1
        while (
            last < pages.singles
            and pages.tokens[last] <= room
            and (last + 1 - first) * pages.tokens[last] <= GATHER_TOKENS
        ):
            last += 1
        width = ceil_div(pages.tokens[last - 1], size)
        hidden = torch.arange(width * size, device=pages.lengths.device)[None] >= pages.lengths[first:last, None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
        jobs.append(_PaddedRows(first, last, pages.blocks[first:last, :width].reshape(-1), mask[:, None, None]))
        first = last
    return jobs


def _chunks(pages: _Pages, size: int) -> list[_Chunk]:
    jobs = []
    row = pages.singles
    for i in range(pages.singles, len(pages.rows)):
        rows, tokens = pages.rows[i], pages.tokens[i]
        masks: list[tuple[int, int, torch.Tensor | None]] = [(0, rows, None)]
        if rows < tokens:
            step = max(16, MASK_ENTRIES // tokens)
            places = torch.arange(tokens, device=pages.lengths.device)
            masks = [
                (first, last, places[None] <= places[tokens - rows + first : tokens - rows + last, None])
                for first, last in ((cut, min(cut + step, rows)) for cut in range(0, rows, step))
            ]
        blocks = pages.blocks[i, : ceil_div(tokens, size)]
        jobs.append(_Chunk(row, row + rows, tokens, blocks, tuple(masks)))
        row += rows
    return jobs


def _attend_rows(
    pool: KvPool, layer: int, job: _PaddedRows, query: torch.Tensor, output: torch.Tensor, scale: float
) -> None:
    count = job.last - job.first
    _, heads, head_dim = query.shape
    kv_heads = pool.keys[layer].shape[1]
    key, value = (
        found.view(count, -1, kv_heads, head_dim).transpose(1, 2) for found in _copied(pool, layer, job.blocks)
    )
    # The heads of a group stand as rows of their key-value head's own query: nothing is repeated.
    grouped = query[job.first : job.last].reshape(count, kv_heads, heads // kv_heads, head_dim)
    mask = job.mask.expand(-1, kv_heads, heads // kv_heads, -1)
    found = scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scale)
    output[job.first : job.last] = found.reshape(count, heads, head_dim)


def _attend_chunk(
    pool: KvPool, layer: int, job: _Chunk, query: torch.Tensor, output: torch.Tensor, scale: float
) -> None:
    rows = job.last - job.first
    _, heads, head_dim = query.shape
    kv_heads = pool.keys[layer].shape[1]
    grouped = query[job.first : job.last].view(rows, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)
    key, value = (
        found[: job.tokens].transpose(0, 1)[:, None].expand(-1, heads // kv_heads, -1, -1)
        for found in _copied(pool, layer, job.blocks)
    )
    for first, last, mask in job.masks:
        found = scaled_dot_product_attention(
            grouped[:, :, first:last], key, value, attn_mask=mask, is_causal=mask is None, scale=scale
        )
        output[job.first + first : job.first + last] = found.permute(2, 0, 1, 3).reshape(last - first, heads, head_dim)


def _copied(pool: KvPool, layer: int, blocks: torch.Tensor) -> list[torch.Tensor]:
    """Copy ``blocks`` of one layer: keys and values [blocks * block_size, kv_heads, head_dim]."""
    paged = (slots.view(-1, pool.block_size, *slots.shape[1:]) for slots in (pool.keys[layer], pool.values[layer]))
    return [slots.index_select(0, blocks).flatten(0, 1) for slots in paged]


SDPA = SdpaBackend()
