"""Attention backends that copy a step's KV out of the pool and call a kernel that knows no block tables.

What is copied at once is bounded: packed for variable-length kernels, padded for ``scaled_dot_product_attention``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import scaled_dot_product_attention

from serve_app.engine.attention.page_table import PageTable, plan_pages
from serve_app.engine.attention.paging import KvPool, PagedStep, write_kv
from serve_app.engine.step import Segment, ceil_div

GATHER_TOKENS = 128 * 1024
"""Tokens copied at once, unless one sequence has more: 512 MiB for 8 heads of 128 in bfloat16."""

MASK_ENTRIES = 32 * 1024 * 1024
"""Rows times tokens of one mask of a chunk that continues a sequence."""

CAUSAL = (-1, 0)
"""The window of ``varlen_attn`` in which a sequence's last row sees all of its tokens."""


@dataclass(frozen=True, slots=True)
class _PackedPart:
    """Sequences whose KV is copied together: ``slots`` [S] in order."""

    first: int
    last: int
    cu_rows: torch.Tensor
    cu_tokens: torch.Tensor
    slots: torch.Tensor
    most_rows: int
    most_tokens: int


class GatheredVarlen:
    """Copies each sequence's KV into one packed row and calls a kernel of ``varlen_attn``'s signature."""

    in_graphs = False

    def __init__(self, name: str, varlen_attn: Callable[..., torch.Tensor]) -> None:
        self.name = name
        self._varlen_attn = varlen_attn

    def plan(self, pool: KvPool, segments: Sequence[Segment], rows: int = 0) -> PagedStep:
        """Plan a step; see ``AttentionBackend``."""
        step = plan_pages(pool, segments, self, rows)
        return replace(step, plan=_packed_parts(step.plan, pool.block_size))

    def attend(
        self, step: PagedStep, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Write ``key`` and ``value``, attend ``query``; see ``AttentionBackend``."""
        write_kv(step, layer, key, value)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        parts: list[_PackedPart] = step.plan
        for part in parts:
            output[part.first : part.last] = self._varlen_attn(
                query[part.first : part.last],
                step.pool.keys[layer].index_select(0, part.slots),
                step.pool.values[layer].index_select(0, part.slots),
                part.cu_rows,
                part.cu_tokens,
                part.most_rows,
                part.most_tokens,
                scale=scale,
                window_size=CAUSAL,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        return output


def _packed_parts(pages: PageTable, size: int) -> list[_PackedPart]:
    parts = []
    row = 0
    for first, last in _groups(pages.tokens, 0, len(pages.tokens)):
        total, rows = sum(pages.tokens[first:last]), sum(pages.rows[first:last])
        lengths = pages.lengths[first:last].long()
        cu_tokens = torch.zeros(last - first + 1, dtype=torch.int64, device=lengths.device)
        torch.cumsum(lengths, 0, out=cu_tokens[1:])
        numbers = torch.arange(last - first, device=lengths.device)
        owner = torch.repeat_interleave(numbers, lengths, output_size=total)
        position = torch.arange(total, device=lengths.device) - cu_tokens[owner]
        slots = pages.blocks[first + owner, position // size].long() * size + position % size
        parts.append(
            _PackedPart(
                row,
                row + rows,
                pages.cu_rows[first : last + 1] - row,
                cu_tokens.int(),
                slots,
                max(pages.rows[first:last]),
                max(pages.tokens[first:last]),
            )
        )
        row += rows
    return parts


def _groups(tokens: Sequence[int], first: int, last: int) -> list[tuple[int, int]]:
    """Cut sequences ``first`` to ``last`` - 1 into neighbours of at most ``GATHER_TOKENS`` together."""
    groups: list[tuple[int, int]] = []
    total = 0
    for i in range(first, last):
        if groups and total + tokens[i] <= GATHER_TOKENS:
            groups[-1] = (groups[-1][0], i + 1)
            total += tokens[i]
        else:
            groups.append((i, i + 1))
            total = tokens[i]
    return groups


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
    """Copies KV into padded batches for torch's own attention: runs wherever torch runs."""

    name = "sdpa"
    in_graphs = False

    def plan(self, pool: KvPool, segments: Sequence[Segment], rows: int = 0) -> PagedStep:
        """Plan a step; see ``AttentionBackend``."""
        step = plan_pages(pool, segments, self, rows)
        pages: PageTable = step.plan
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


def _padded_rows(pages: PageTable, size: int, dtype: torch.dtype) -> list[_PaddedRows]:
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


def _chunks(pages: PageTable, size: int) -> list[_Chunk]:
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
