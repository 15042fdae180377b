"""The paged KV pool, and a step over it: one packed row of T tokens, with its sequences one after another.

Slot ``block * block_size + i`` of a layer holds token i of a block: keys and values [slots, kv_heads, head_dim]. With
blocks [7, 3] of 16, positions 0 to 20 have their KV in slots 112 to 127 and 48 to 52; slots 53 to 63 are stale.

The KV that a step's rows attend to: runs of the pool read in place, copied blocks, and new tokens.

On a CPU a long run is read in place, once for all rows that begin with it; short or scattered blocks are copied.
For instance two rows after 512 tokens in common, with blocks of 16::

    slots    0 ............... 511 | 512 ... 559 | 3200 ... 3239
    row 0    read once, for both     copied
    row 1    read once, for both                   copied

On other devices every sequence is copied whole, for torch's own attention.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch.nn.attention.bias import causal_lower_right

from serve_app.engine.step import Segment, ceil_div

LONG_RUN_TOKENS = 256
"""Runs of at least this length are read in place; for shorter ones one gather for many sequences costs less."""

SMALL_TABLE_BLOCKS = 16
"""Tables up to this many blocks share one padded copy; longer ones are padded to twice their length at most."""

GATHER_TOKENS = 128 * 1024
"""Tokens copied at once, unless one sequence has more: 512 MiB for 8 heads of 128 in bfloat16."""

RowIndex = torch.Tensor | slice


@dataclass(frozen=True, slots=True)
class Read:
    """Packed ``rows`` attend to the first ``tokens`` tokens of one common place, or of one place each.

    ``place``: a slice of the pool's slots; or blocks to copy, as many tables as ``mask`` has rows; or None for the
    rows' own new keys. ``mask``: addend of the scores [tables, 1, 1, tokens]; for a chunk, the visible [rows, tokens].
    ``causal``: the rows are a chunk; each sees the tokens up to its own, or those of the mask.
    ``partial``: the result is merged with other reads of these rows.
    """

    rows: RowIndex
    place: torch.Tensor | slice | None
    tokens: int
    mask: torch.Tensor | None = None
    causal: bool = False
    partial: bool = False


@dataclass(slots=True)
class _Table:
    """``rows`` read the first ``seen`` tokens of a segment; ``blocks``: the blocks that they copy."""

    rows: range
    part: Segment
    seen: int
    blocks: list[int] = field(default_factory=list)


def plan_reads(
    parts: Sequence[Segment], block_size: int, dtype: torch.dtype, device: torch.device, *, in_place: bool
) -> tuple[Read, ...]:
    """Plan the reads of ``parts``, given in the packed order.

    ``in_place``: read long runs in place, which needs an attention that returns log-sum-exps for merging. A chunk then
    reads its past without a mask, as one mask over both would double the kernel's time.
    """
    reads: list[Read] = []
    tables: list[_Table] = []
    row = 0
    for part in parts:
        rows = range(row, row + len(part.token_ids))
        row = rows.stop
        if len(rows) == 1:
            tables.append(_Table(rows, part, part.end))
        elif part.start and not in_place:
            blocks = torch.tensor(part.blocks[: ceil_div(part.end, block_size)], device=device)
            seen = causal_lower_right(len(rows), part.end)
            reads.append(Read(_index(rows), blocks, part.end, seen, causal=True))
        else:
            reads.append(Read(_index(rows), None, len(rows), causal=True))
            if part.start:
                tables.append(_Table(rows, part, part.start))
    reads.extend(_runs(tables, block_size, in_place=in_place))
    reads.extend(_copies(tables, block_size, dtype, device))
    return tuple(replace(read, partial=True) for read in reads) if in_place and len(reads) > 1 else tuple(reads)


def _runs(tables: Sequence[_Table], block_size: int, *, in_place: bool) -> Iterator[Read]:
    """Yield the runs to read in place, each once for all rows that begin with it; the rest goes to ``blocks``."""
    starting: dict[int, list[tuple[_Table, int]]] = defaultdict(list)

    def read(table: _Table, first: int, count: int) -> None:
        if in_place and count * block_size >= max(LONG_RUN_TOKENS, block_size):
            starting[first].append((table, count))
        else:
            table.blocks.extend(range(first, first + count))

    for table in tables:
        whole = table.seen // block_size
        for first, count in table.part.runs:
            read(table, first, min(count, whole))
            whole -= min(count, whole)
    while starting:
        first = min(starting)
        readers = starting.pop(first)
        length = min(count for _, count in readers)
        for table, count in readers:
            read(table, first + length, count - length)
        rows = [row for table, _ in readers for row in table.rows]
        yield Read(_index(rows), slice(first * block_size, (first + length) * block_size), length * block_size)


def _alike(tables: Mapping[int, int], block_size: int) -> Iterator[list[int]]:
    """Yield groups of keys with similar numbers of blocks: padding at most doubles a copy."""
    group: list[int] = []
    for key in sorted(tables, key=tables.__getitem__):
        width = tables[key]
        padded = width > 2 * max(tables[group[0]], SMALL_TABLE_BLOCKS) if group else False
        if padded or (group and (len(group) + 1) * width * block_size > GATHER_TOKENS):
            yield group
            group = []
        group.append(key)
    if group:
        yield group


def _copies(tables: Sequence[_Table], block_size: int, dtype: torch.dtype, device: torch.device) -> Iterator[Read]:
    """Yield the copied reads, padded where several rows share one; each chunk has its own."""
    singles: dict[int, _Table] = {}
    for table in tables:
        if table.seen % block_size:  # last, because everything after it in the copy counts as not seen
            table.blocks.append(table.part.blocks[table.seen // block_size])
        if len(table.rows) == 1 and table.blocks:
            singles[table.rows[0]] = table
        elif table.blocks:
            blocks = torch.tensor(table.blocks, device=device)
            yield Read(_index(table.rows), blocks, _copied_tokens(table, block_size))
    for rows in _alike({row: len(table.blocks) for row, table in singles.items()}, block_size):
        group = [singles[row] for row in rows]
        width = len(group[-1].blocks)
        # Padding repeats the row's own first block: its content is finite whenever the row itself is.
        padded = [[*table.blocks, *table.blocks[:1] * (width - len(table.blocks))] for table in group]
        lengths = torch.tensor([_copied_tokens(table, block_size) for table in group], device=device)
        tokens = width * block_size
        hidden = torch.arange(tokens, device=device)[None] >= lengths[:, None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
        yield Read(_index(rows, device), torch.tensor(padded, device=device).flatten(), tokens, mask[:, None, None])


def _copied_tokens(table: _Table, block_size: int) -> int:
    """Return the number of copied tokens that are visible."""
    unused = -table.seen % block_size
    return len(table.blocks) * block_size - unused


def _index(rows: Sequence[int], device: torch.device | None = None) -> RowIndex:
    """Return row numbers; neighbours become a slice, which costs no indexing kernel."""
    if list(rows) == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return torch.tensor(rows, device=device)


PADDED_ROWS = 16
"""A step of more than ``UNPADDED_ROWS`` tokens is padded to a multiple of this: few shapes, few compiled kernels."""

UNPADDED_ROWS = 64


class KvPool:
    """The KV of all blocks: ``tensor`` [layers, 2, blocks, block_size, kv_heads, head_dim], initially zero."""

    def __init__(
        self,
        layers: int,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.tensor = torch.zeros(layers, 2, num_blocks, block_size, kv_heads, head_dim, dtype=dtype, device=device)
        self.block_size = block_size
        self.slots = self.tensor.view(layers, 2, num_blocks * block_size, kv_heads, head_dim)
        self.keys = list(self.slots[:, 0])
        self.values = list(self.slots[:, 1])
        self._copies = [self.tensor.new_empty(0), self.tensor.new_empty(0)]

    def copy(self, layer: int, plane: int, blocks: torch.Tensor) -> torch.Tensor:
        """Return copies of a layer's keys (plane 0) or values (1), in memory that the plane's next call overwrites.

        [n, block_size, kv_heads, head_dim]; ``blocks`` [n].
        """
        shape = (len(blocks), *self.tensor.shape[3:])
        if self._copies[plane].numel() < math.prod(shape):
            self._copies[plane] = self.tensor.new_empty(math.prod(shape))
        room = self._copies[plane][: math.prod(shape)].view(shape)
        return torch.index_select(self.tensor[layer, plane], 0, blocks, out=room)

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write ``key`` and ``value`` [n, kv_heads, head_dim] to ``slots`` [n] of a layer."""
        self.keys[layer].index_copy_(0, slots, key)
        self.values[layer].index_copy_(0, slots, value)


@dataclass(frozen=True, slots=True)
class PagedStep:
    """The packed row [1, T] of a step. ``order[i]``: the segment at place i; single tokens come first.

    ``slots``: destinations of the real tokens' KV; the rows after them are padding, computed and ignored.
    ``logit_rows``: the packed rows that sample a token. ``reads``: the KV that the rows attend to, in every layer.
    """

    pool: KvPool
    order: tuple[int, ...]
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    slots: torch.Tensor
    logit_rows: torch.Tensor
    reads: tuple[Read, ...]


def plan_step(pool: KvPool, segments: Sequence[Segment], *, in_place: bool) -> PagedStep:
    """Pack ``segments`` into one row. Zeroes the rest of new blocks: a stale NaN would survive the mask."""
    order = sorted(range(len(segments)), key=lambda i: len(segments[i].token_ids) > 1)
    parts = [segments[i] for i in order]
    device = pool.tensor.device
    stale = [slot for part in parts for slot in _stale_slots(part, pool.block_size)]
    if stale:
        pool.slots.index_fill_(2, torch.tensor(stale, device=device), 0)
    ids = np.concatenate([part.token_ids for part in parts])
    positions = np.concatenate([np.arange(part.start, part.end) for part in parts])
    blank = -len(ids) % PADDED_ROWS if len(ids) > UNPADDED_ROWS else 0
    lasts = np.cumsum([len(part.token_ids) for part in parts]) - 1
    return PagedStep(
        pool=pool,
        order=tuple(order),
        input_ids=torch.from_numpy(np.pad(ids, (0, blank)).astype(np.int64)[None]).to(device),
        position_ids=torch.from_numpy(np.pad(positions, (0, blank))[None]).to(device),
        slots=torch.tensor([slot for part in parts for slot in _slots_of(part, pool.block_size)], device=device),
        logit_rows=torch.from_numpy(lasts[[part.sampling is not None for part in parts]]).to(device),
        reads=plan_reads(parts, pool.block_size, pool.tensor.dtype, device, in_place=in_place),
    )


def _slots_of(segment: Segment, block_size: int) -> list[int]:
    """Return the slots of a segment's own tokens."""
    blocks = segment.blocks
    return [
        blocks[position // block_size] * block_size + position % block_size
        for position in range(segment.start, segment.end)
    ]


def _stale_slots(segment: Segment, block_size: int) -> range:
    """Return the slots after a segment's end in a block that it begins, with stale KV of an earlier owner."""
    used = segment.end % block_size
    if not used or segment.start > segment.end - used:
        return range(0)
    first = segment.blocks[segment.end // block_size] * block_size
    return range(first + used, first + block_size)
