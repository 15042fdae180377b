"""What the rows of a step attend to: runs of the pool that are read in place, blocks that are copied, and new tokens.

On a CPU long runs are read in place, once for all rows that begin with them, and what is short or scattered is copied.
For instance two rows after 512 tokens in common, with blocks of 16::

    slots    0 ............... 511 | 512 ... 559 | 3200 ... 3239
    row 0    read once, for both     copied
    row 1    read once, for both                   copied

Elsewhere every sequence is copied whole, for torch's own attention.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from serve_app.engine.step import Segment, block_runs, ceil_div

LONG_RUN_TOKENS = 256
"""From this length on a decode reads a run in place; below, one gather for many sequences costs less."""

RUNS_IN_PLACE = 4
"""A chunk whose past lies in more runs copies it together: every run is a call, and rounds the result once more."""

SMALL_TABLE_BLOCKS = 16
"""Tables up to this many blocks share one padded copy; longer ones are padded to twice their length at most."""

GATHER_TOKENS = 128 * 1024
"""Tokens copied at once, unless one sequence has more: 512 MiB for 8 heads of 128 in bfloat16."""

MASK_ENTRIES = 32 * 1024 * 1024
"""Rows times tokens of one mask of a chunk that continues a sequence."""

Rows = torch.Tensor | slice


@dataclass(frozen=True, slots=True)
class Read:
    """Packed ``rows`` attend to the first ``tokens`` tokens of a place, or of a place each.

    ``place``: a slice of the pool's slots; or blocks to copy, as many tables as ``mask`` has rows; or None, the rows'
    own new keys. ``mask``: what is added to scores, [tables, 1, 1, tokens]; of a chunk, [rows, tokens], what is seen.
    ``causal``: the rows are a chunk, each of which sees the tokens up to its own, or what the mask says.
    ``partial``: the result is merged with those of the other reads of these rows.
    """

    rows: Rows
    place: torch.Tensor | slice | None
    tokens: int
    mask: torch.Tensor | None = None
    causal: bool = False
    partial: bool = False


def plan_reads(
    parts: Sequence[Segment], block_size: int, dtype: torch.dtype, device: torch.device, *, in_place: bool
) -> tuple[Read, ...]:
    """Plan what each of ``parts``, which are in the packed order, reads.

    ``in_place``: read long runs where they lie, which takes an attention that tells how to merge results.
    """
    singles = [part for part in parts if len(part.token_ids) == 1]
    if in_place:
        tables, long_runs = _split(singles, block_size)
        reads = [*long_runs, *_copies(tables, block_size, dtype, device)]
        if len(reads) > 1:
            reads = [replace(read, partial=True) for read in reads]
    else:
        whole = (_Table(list(part.blocks[: ceil_div(part.end, block_size)]), part.end) for part in singles)
        reads = list(_copies(dict(enumerate(whole)), block_size, dtype, device))
    row = len(singles)
    for part in parts[row:]:
        rows = slice(row, row + len(part.token_ids))
        if not part.start:
            reads.append(Read(rows, None, part.end, causal=True))
        elif in_place:
            reads.append(Read(rows, None, len(part.token_ids), causal=True, partial=True))
            reads.extend(_past(part, rows, block_size))
        else:
            reads.extend(_masked(part, rows, block_size, device))
        row = rows.stop
    return tuple(reads)


@dataclass(slots=True)
class _Table:
    """Blocks that one row copies, of which the first ``tokens`` tokens count."""

    blocks: list[int]
    tokens: int

    def add(self, slot: int, slots: int, block_size: int) -> None:
        """Copy ``slots`` slots from the beginning of a block on; a block that counts in part only stays the last."""
        first, parted = slot // block_size, slots % block_size
        blocks = range(first, first + ceil_div(slots, block_size))
        self.blocks = [*self.blocks, *blocks] if parted else [*blocks, *self.blocks]
        self.tokens += slots


def _split(singles: Sequence[Segment], block_size: int) -> tuple[dict[int, _Table], list[Read]]:
    """Return what single-token rows copy, by row, and the runs that they read in place, shared where they can be."""
    tables = {row: _Table([], 0) for row in range(len(singles))}
    starting: dict[int, list[tuple[int, int]]] = defaultdict(list)

    def read(row: int, slot: int, slots: int) -> None:
        if slots >= max(LONG_RUN_TOKENS, block_size):
            starting[slot].append((row, slots))
        elif slots:
            tables[row].add(slot, slots, block_size)

    for row, part in enumerate(singles):
        left = part.end
        for block, count in part.runs:
            read(row, block * block_size, min(count * block_size, left))
            left -= min(count * block_size, left)
    reads = []
    while starting:
        slot = min(starting)
        readers = starting.pop(slot)
        length = min(slots for _, slots in readers) // block_size * block_size
        for row, slots in readers:
            read(row, slot + length, slots - length)
        rows = [row for row, _ in readers]
        reads.append(Read(_index(rows), slice(slot, slot + length), length))
    return {row: table for row, table in tables.items() if table.tokens}, reads


def alike(tables: Mapping[int, int], block_size: int) -> Iterator[list[int]]:
    """Yield the keys of tables of so many blocks, those of like length together: padding at most doubles a copy."""
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


def _copies(tables: Mapping[int, _Table], block_size: int, dtype: torch.dtype, device: torch.device) -> Iterator[Read]:
    """Yield padded copies of what rows read, by row."""
    for rows in alike({row: len(table.blocks) for row, table in tables.items()}, block_size):
        group = [tables[row] for row in rows]
        width = len(group[-1].blocks)
        # Padding repeats the row's own first block: what is there is finite whenever the row itself is.
        padded = [[*table.blocks, *table.blocks[:1] * (width - len(table.blocks))] for table in group]
        lengths = torch.tensor([table.tokens for table in group], device=device)
        tokens = width * block_size
        hidden = torch.arange(tokens, device=device)[None] >= lengths[:, None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
        yield Read(_index(rows, device), torch.tensor(padded, device=device).flatten(), tokens, mask[:, None, None])


def _past(part: Segment, rows: slice, block_size: int) -> Iterator[Read]:
    """Yield what a chunk comes after, on a CPU: unmasked, for a mask over both would take the kernel twice as long."""
    blocks = part.blocks[: ceil_div(part.start, block_size)]
    runs = block_runs(blocks)
    if len(runs) > RUNS_IN_PLACE:
        yield Read(rows, torch.tensor(blocks), part.start, partial=True)
        return
    left = part.start
    for block, count in runs:
        tokens = min(count * block_size, left)
        yield Read(rows, slice(block * block_size, block * block_size + tokens), tokens, partial=True)
        left -= tokens


def _masked(part: Segment, rows: slice, block_size: int, device: torch.device) -> Iterator[Read]:
    """Yield a chunk and what it comes after together, in pieces whose masks are bounded."""
    most = max(16, MASK_ENTRIES // part.end)
    for first in range(rows.start, rows.stop, most):
        last = min(first + most, rows.stop)
        tokens = part.end - (rows.stop - last)
        places = torch.arange(tokens, device=device)
        blocks = torch.tensor(part.blocks[: ceil_div(tokens, block_size)], device=device)
        seen = places[None] <= places[tokens - (last - first) :, None]
        yield Read(slice(first, last), blocks, tokens, seen, causal=True)


def _index(rows: Sequence[int], device: torch.device | None = None) -> Rows:
    """Return row numbers; neighbours are a slice, which costs no indexing kernel."""
    if list(rows) == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return torch.tensor(rows, device=device)
