"""What the runs backend reads of the pool: prefill parts, and decode jobs of long runs and of the scattered rest.

A long run is read in place, once for all rows that begin with it; what is short or scattered is copied.
For instance two rows after 512 tokens in common, with blocks of 16 and ``SHAPE_TOKENS`` 128::

    slots    0 ............... 511 | 512 ... 559 | 560 ... 639 | 3200 ... 3239
    row 0    read once, for both     copied        copied        copied
    row 1    read once, for both     copied
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from serve_app.engine.attention.paging import KvPool
from serve_app.engine.attention.step_layout import block_table, runs_of
from serve_app.engine.step import Segment, ceil_div

LONG_RUN_TOKENS = 256
"""From this length on a decode reads a run in place; below, one gather for many sequences costs less."""

SHAPE_TOKENS = 128
"""Decodes read runs in place in multiples of this: few shapes, few kernels compiled."""

PIECES_IN_PLACE = 4
"""A chunk whose past lies in more runs copies it together: every run is a call, and rounds the result once more."""

SMALL_REST_BLOCKS = 16
"""Rests up to this many blocks share one padded gather; longer ones are grouped by powers of two."""

Rows = torch.Tensor | slice
"""Row numbers; a single one is a slice, which costs no indexing kernel."""


class Piece(NamedTuple):
    """``slots`` neighbouring slots of the pool from ``slot`` on."""

    slot: int
    slots: int


@dataclass(frozen=True, slots=True)
class PrefillPart:
    """Rows ``first`` to ``last`` of the packed step: new tokens of one sequence after those that are computed.

    ``pieces``: where the computed ones' KV lies, in order. ``blocks``: where it is scattered, the blocks to copy
    together; the one piece lies in the copy.
    """

    first: int
    last: int
    pieces: tuple[Piece, ...]
    blocks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ViewJob:
    """Decode rows that attend to one contiguous run. ``target``: their rows among the partial results."""

    piece: Piece
    rows: Rows
    target: Rows


@dataclass(frozen=True, slots=True)
class LoneRuns:
    """Decode rows that attend to a run of their own each; ``rows`` and ``target`` [n]."""

    runs: tuple[Piece, ...]
    rows: torch.Tensor
    target: torch.Tensor


@dataclass(frozen=True, slots=True)
class GatherJob:
    """Decode rows that attend to scattered blocks: ``blocks`` [rows * width], ``mask`` [rows, 1, 1, width * size]."""

    blocks: torch.Tensor
    mask: torch.Tensor
    rows: Rows
    target: Rows


@dataclass(frozen=True, slots=True)
class DecodePart:
    """Rows 0 to ``rows`` - 1 of the packed step, one token each; ``partials`` results a row are merged."""

    rows: int
    partials: int
    views: tuple[ViewJob, ...]
    lone: LoneRuns | None
    gathers: tuple[GatherJob, ...]


@dataclass(frozen=True, slots=True)
class RunsPlan:
    """The plan of a step: its single-token rows, if there are any, then its chunks."""

    decode: DecodePart | None
    prefills: tuple[PrefillPart, ...]


@dataclass(slots=True)
class RowReads:
    """What one decode row copies, and how many partial results it has so far.

    ``last_blocks`` end with the one that counts in part only, if there is one. ``copied_slots``: how many slots count.
    """

    row: int
    blocks: list[int] = field(default_factory=list)
    last_blocks: list[int] = field(default_factory=list)
    copied_slots: int = 0
    partials: int = 0

    def copy(self, slot: int, slots: int, size: int) -> None:
        """Copy ``slots`` slots from ``slot`` on, which begins a block of ``size``."""
        first, parted = slot // size, slots % size
        (self.last_blocks if parted else self.blocks).extend(range(first, first + slots // size + (parted > 0)))
        self.copied_slots += slots

    def next_target(self, rows: int) -> int:
        """Return the row's place for one more result among ``rows`` results at a time."""
        self.partials += 1
        return (self.partials - 1) * rows + self.row


class SharedRun(NamedTuple):
    """A run that is read in place, once for all ``readers``."""

    piece: Piece
    readers: list[RowReads]


class LongRuns:
    """Splits what rows read into runs that are read in place, shared where rows begin alike, and a rest to copy."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._quantum = math.lcm(min(SHAPE_TOKENS, LONG_RUN_TOKENS), block_size)
        self._least = max(LONG_RUN_TOKENS, self._quantum)
        self._starting: dict[int, list[tuple[RowReads, int]]] = {}

    def add(self, reader: RowReads, segment: Segment) -> None:
        """Let ``reader`` read all positions of ``segment``."""
        left = segment.end
        for block, count in segment.runs:
            if left <= 0:
                break
            self._read(reader, block * self._size, min(count * self._size, left))
            left -= count * self._size

    def shared(self) -> Iterator[SharedRun]:
        """Yield runs as long as all their readers read; what single readers read beyond them is split again."""
        while self._starting:
            slot = min(self._starting)
            readers = self._starting.pop(slot)
            length = min(slots for _, slots in readers) // self._quantum * self._quantum
            for reader, slots in readers:
                if slots > length:
                    self._read(reader, slot + length, slots - length)
            yield SharedRun(Piece(slot, length), [reader for reader, _ in readers])

    def _read(self, reader: RowReads, slot: int, slots: int) -> None:
        if slots >= self._least:
            self._starting.setdefault(slot, []).append((reader, slots))
        else:
            reader.copy(slot, slots, self._size)


def plan_runs(pool: KvPool, segments: Sequence[Segment]) -> RunsPlan:
    """Plan what each of ``segments``, which are in the packed order, reads."""
    singles = [segment for segment in segments if len(segment.token_ids) == 1]
    prefills: list[PrefillPart] = []
    row = len(singles)
    for segment in segments[row:]:
        prefills.append(_plan_prefill(segment, row, pool))
        row = prefills[-1].last
    return RunsPlan(_plan_decode(pool, singles) if singles else None, tuple(prefills))


def _plan_prefill(segment: Segment, row: int, pool: KvPool) -> PrefillPart:
    past, last = segment.start, row + len(segment.token_ids)
    runs = list(runs_of(segment, ceil_div(past, pool.block_size)))
    if len(runs) > PIECES_IN_PLACE:
        blocks = torch.from_numpy(block_table(segment, past, pool.block_size))
        return PrefillPart(row, last, (Piece(0, past),), blocks)
    pieces, left = [], past
    for block, count in runs:
        pieces.append(Piece(block * pool.block_size, min(count * pool.block_size, left)))
        left -= pieces[-1].slots
    return PrefillPart(row, last, tuple(pieces))


def _plan_decode(pool: KvPool, segments: Sequence[Segment]) -> DecodePart:
    long_runs = LongRuns(pool.block_size)
    readers = [RowReads(row) for row in range(len(segments))]
    for reader, segment in zip(readers, segments, strict=True):
        long_runs.add(reader, segment)
    rows = len(readers)
    shared = list(long_runs.shared())
    alone = [run for run in shared if len(run.readers) == 1]
    lone = None
    if len(alone) > 1:
        shared = [run for run in shared if len(run.readers) > 1]
        lone = _lone_runs(alone, rows)
    views = tuple(ViewJob(run.piece, *_rows_and_targets(run.readers, rows)) for run in shared)
    gathers = tuple(_gather_jobs(pool, readers))
    return DecodePart(rows, max(reader.partials for reader in readers), views, lone, gathers)


def _lone_runs(alone: Sequence[SharedRun], rows: int) -> LoneRuns:
    readers = [run.readers[0] for run in alone]
    targets = torch.tensor([reader.next_target(rows) for reader in readers])
    return LoneRuns(tuple(run.piece for run in alone), torch.tensor([reader.row for reader in readers]), targets)


def _gather_jobs(pool: KvPool, readers: Sequence[RowReads]) -> Iterator[GatherJob]:
    """Yield one padded gather for rows that copy a like number of blocks."""
    groups: dict[int, list[tuple[RowReads, list[int]]]] = {}
    for reader in readers:
        blocks = [*reader.blocks, *reader.last_blocks]
        if blocks:
            bucket = max(len(blocks) - 1, SMALL_REST_BLOCKS - 1).bit_length()
            groups.setdefault(bucket, []).append((reader, blocks))
    for _, group in sorted(groups.items()):
        yield _gather_job(pool, [reader for reader, _ in group], [blocks for _, blocks in group], len(readers))


def _gather_job(pool: KvPool, readers: Sequence[RowReads], tables: Sequence[list[int]], rows: int) -> GatherJob:
    width = max(map(len, tables))
    # Padding repeats the row's own first block: what is there is finite whenever the row itself is.
    table = np.array([[*blocks, *[blocks[0]] * (width - len(blocks))] for blocks in tables])
    lengths = np.array([reader.copied_slots for reader in readers])
    hidden = torch.from_numpy(np.arange(width * pool.block_size)[None, :] >= lengths[:, None])
    mask = torch.zeros(len(readers), 1, 1, width * pool.block_size, dtype=pool.tensor.dtype)
    mask.masked_fill_(hidden[:, None, None, :], float("-inf"))
    blocks_index = torch.from_numpy(table.reshape(-1))
    return GatherJob(blocks_index, mask, *_rows_and_targets(readers, rows))


def _rows_and_targets(readers: Sequence[RowReads], rows: int) -> tuple[Rows, Rows]:
    """Return the readers' rows, and a place for one more result of each."""
    return _numbers([reader.row for reader in readers]), _numbers([reader.next_target(rows) for reader in readers])


def _numbers(wanted: Sequence[int]) -> Rows:
    return slice(wanted[0], wanted[0] + 1) if len(wanted) == 1 else torch.tensor(wanted)
