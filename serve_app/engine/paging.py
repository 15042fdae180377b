"""Where each token's KV lies: the index tensors of one step, built once and used by every layer.

Owns the KV pool tensor, the scratch memory, and the plan of a step's attention: prefill parts, and decode jobs
that read long runs as views (once for all sequences that share them) and the rest by a padded gather. Knows
nothing of the model. Segments flow in, a PagedStep flows out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from serve_app.engine.step import Segment

Rows = torch.Tensor | slice
"""Row numbers; a single one is a slice, which costs no indexing kernel."""

LONG_RUN_TOKENS = 256
"""From this length on a decode reads a run in place; below, one gather for many sequences costs less."""

SHAPE_TOKENS = 128
"""Decodes read runs in place in multiples of this: few shapes, few kernels compiled."""

PIECES_IN_PLACE = 4
"""A chunk whose past lies in more runs copies it together: every run is a call, and rounds the result once more."""

PADDED_ROWS = 16
"""A step of more than 64 tokens is padded to a multiple of this, for the same reason."""

SMALL_REST_BLOCKS = 16
"""Rests up to this many blocks share one padded gather; longer ones are grouped by powers of two."""


class KvPool:
    """The KV of all blocks: ``tensor`` [layers, 2, blocks, block_size, kv_heads, head_dim], zeros at first.

    With ``scratch_block`` there is one block more, the last, that belongs to nobody: where padding rows write.
    """

    def __init__(
        self,
        layers: int,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        scratch_block: bool = False,
    ) -> None:
        self.num_blocks = num_blocks
        num_blocks += scratch_block
        self.tensor = torch.zeros(layers, 2, num_blocks, block_size, kv_heads, head_dim, dtype=dtype, device=device)
        self.block_size = block_size
        slots = self.tensor.view(layers, 2, num_blocks * block_size, kv_heads, head_dim)
        self.keys = [slots[layer, 0] for layer in range(layers)]
        self.values = [slots[layer, 1] for layer in range(layers)]
        lined = self.tensor.view(layers, 2, num_blocks, block_size * kv_heads * head_dim)
        self.key_blocks = [lined[layer, 0] for layer in range(layers)]
        self.value_blocks = [lined[layer, 1] for layer in range(layers)]
        self._scratch: dict[str, torch.Tensor] = {}

    def scratch(self, name: str, *shape: int) -> torch.Tensor:
        """Return uninitialized memory of ``shape``, the same for every call with ``name`` (it only grows)."""
        size = math.prod(shape)
        flat = self._scratch.get(name)
        if flat is None or flat.numel() < size:
            flat = torch.empty(size, dtype=self.tensor.dtype, device=self.tensor.device)
            self._scratch[name] = flat
        return flat[:size].view(shape)


@dataclass(frozen=True, slots=True)
class PrefillPart:
    """Rows ``first`` to ``last`` of the packed step: new tokens of one sequence after ``past`` computed ones.

    ``pieces``: (first slot, slots) of the past's KV in order. ``blocks``: where these are many, the past's blocks,
    which are copied together then.
    """

    first: int
    last: int
    past: int
    pieces: tuple[tuple[int, int], ...]
    blocks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ViewJob:
    """Decode rows that attend to one contiguous run of slots. ``target``: their rows among the partial results."""

    slot: int
    slots: int
    rows: Rows
    target: Rows


@dataclass(frozen=True, slots=True)
class LoneRuns:
    """Decode rows that attend to a run of their own each. ``runs``: (slot, slots); ``rows`` and ``target`` [n]."""

    runs: tuple[tuple[int, int], ...]
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
class PageTable:
    """Where each sequence of a step lies, for kernels that follow tables. Sequences are in the step's order.

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


class AttentionBackend(Protocol):
    """One way to attend a step's rows to the pool, on one kind of device."""

    name: str
    in_graphs: bool
    """Whether sizes are read on the device alone, so that a captured decode step is right for other lengths."""

    def plan(self, pool: KvPool, segments: Sequence[Segment], rows: int = 0) -> PagedStep:
        """Lay ``segments`` out as one packed row; zeroes the unused part of every block a segment begins.

        ``rows``: pad a step of single tokens to so many rows (only with ``in_graphs``). All layers use the plan.
        """

    def attend(self, step: PagedStep, layer: int, query: torch.Tensor, scale: float) -> torch.Tensor:
        """Attend ``query`` [T, heads, head_dim], whose own KV is in the pool already; same shape back."""


@dataclass(frozen=True, slots=True)
class PagedStep:
    """The packed row [1, T] of a step. ``order[i]``: which segment came i-th; single tokens come first.

    ``slots`` covers the real tokens; rows from len(``slots``) to T are padding that is computed and ignored.
    ``decode`` and ``prefills`` are the plan of the default backend (None), ``pages`` and ``jobs`` of the others.
    ``logit_rows``: the packed rows whose token is wanted, where they are on the device already.
    """

    pool: KvPool
    order: tuple[int, ...]
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    slots: torch.Tensor
    last_rows: tuple[int, ...]
    decode: DecodePart | None = None
    prefills: tuple[PrefillPart, ...] = ()
    backend: AttentionBackend | None = None
    pages: PageTable | None = None
    jobs: tuple[Any, ...] = ()
    logit_rows: torch.Tensor | None = None


def plan_step(pool: KvPool, segments: Sequence[Segment]) -> PagedStep:
    """Lay ``segments`` out as one packed row; zeroes the unused part of every block a segment begins.

    (Stale numbers beyond a sequence's end are masked out, but a stale NaN would survive the mask.)
    """
    device, size = pool.tensor.device, pool.block_size
    order = sorted(range(len(segments)), key=lambda i: len(segments[i].token_ids) > 1)
    singles = [segments[i] for i in order if len(segments[i].token_ids) == 1]
    ids, positions, slots, last_rows, prefills = [], [], [], [], []
    row = 0
    for i in order:
        segment = segments[i]
        where = np.arange(segment.start, segment.end, dtype=np.int64)
        first_block = segment.start // size
        table = np.asarray(segment.blocks[first_block : (segment.end - 1) // size + 1], dtype=np.int64)
        ids.append(segment.token_ids)
        positions.append(where)
        slots.append(table[where // size - first_block] * size + where % size)
        offset = segment.end % size
        if offset and segment.start <= segment.end - offset:
            pool.tensor[:, :, segment.blocks[segment.end // size], offset:].zero_()
        if len(where) > 1:
            prefills.append(_plan_prefill(segment, row, size, device))
        row += len(where)
        last_rows.append(row - 1)
    padding = -row % PADDED_ROWS if row > 64 else 0
    ids.append(np.zeros(padding, dtype=np.int32))
    positions.append(np.zeros(padding, dtype=np.int64))
    return PagedStep(
        pool=pool,
        order=tuple(order),
        input_ids=torch.from_numpy(np.concatenate(ids).astype(np.int64)).to(device)[None],
        position_ids=torch.from_numpy(np.concatenate(positions)).to(device)[None],
        slots=torch.from_numpy(np.concatenate(slots)).to(device),
        last_rows=tuple(last_rows),
        decode=_plan_decode(pool, singles) if singles else None,
        prefills=tuple(prefills),
    )


def _plan_prefill(segment: Segment, row: int, size: int, device: torch.device) -> PrefillPart:
    pieces = tuple(_pieces(segment, size, segment.start))
    blocks = None
    if len(pieces) > PIECES_IN_PLACE:
        blocks = torch.tensor(segment.blocks[: -(-segment.start // size)], device=device)
    return PrefillPart(row, row + len(segment.token_ids), segment.start, pieces, blocks)


def _pieces(segment: Segment, size: int, tokens: int) -> list[tuple[int, int]]:
    """Return (first slot, slots) of positions 0 to ``tokens`` - 1."""
    pieces, left = [], tokens
    for block, count in segment.runs:
        if left <= 0:
            break
        pieces.append((block * size, min(count * size, left)))
        left -= count * size
    return pieces


def _plan_decode(pool: KvPool, segments: Sequence[Segment]) -> DecodePart:
    size = pool.block_size
    rests: list[list[int]] = [[] for _ in segments]
    rest_slots = [0] * len(segments)
    short: list[list[tuple[int, int]]] = [[] for _ in segments]
    heads: dict[int, list[tuple[int, int]]] = {}
    quantum = math.lcm(min(SHAPE_TOKENS, LONG_RUN_TOKENS), size)
    long_run = max(LONG_RUN_TOKENS, quantum)
    # A row's last piece may end inside a block, and that block has to come last in the row's rest.
    for row, segment in enumerate(segments):
        for slot, slots in _pieces(segment, size, segment.end):
            if slots >= long_run:
                heads.setdefault(slot, []).append((row, slots))
            else:
                short[row].append((slot, slots))
    shared: list[tuple[int, int, list[int]]] = []
    while heads:
        slot = min(heads)
        members = heads.pop(slot)
        cut = min(slots for _, slots in members) // quantum * quantum
        shared.append((slot, cut, [row for row, _ in members]))
        for row, slots in members:
            if slots - cut >= long_run:
                heads.setdefault(slot + cut, []).append((row, slots - cut))
            elif slots > cut:
                short[row].append((slot + cut, slots - cut))
    for row, pieces in enumerate(short):
        for slot, slots in sorted(pieces, key=lambda piece: piece[1] % size > 0):
            rests[row].extend(range(slot // size, (slot + slots - 1) // size + 1))
            rest_slots[row] += slots
    return _decode_jobs(pool, len(segments), shared, rests, rest_slots)


def _decode_jobs(
    pool: KvPool,
    rows: int,
    shared: Sequence[tuple[int, int, list[int]]],
    rests: Sequence[Sequence[int]],
    rest_slots: Sequence[int],
) -> DecodePart:
    device, size = pool.tensor.device, pool.block_size
    partials = [0] * rows

    def upload(wanted: Sequence[int]) -> torch.Tensor:
        return torch.tensor(wanted, device=device)

    def numbers(wanted: Sequence[int]) -> Rows:
        return slice(wanted[0], wanted[0] + 1) if len(wanted) == 1 else upload(wanted)

    def target_of(row: int) -> int:
        partials[row] += 1
        return (partials[row] - 1) * rows + row

    def targets(members: Sequence[int]) -> Rows:
        return numbers([target_of(row) for row in members])

    alone = [(slot, slots, members) for slot, slots, members in shared if len(members) == 1]
    lone = None
    if len(alone) > 1:
        shared = [one for one in shared if len(one[2]) > 1]
        places = [target_of(members[0]) for _, _, members in alone]
        runs = tuple((slot, slots) for slot, slots, _ in alone)
        lone = LoneRuns(runs, upload([members[0] for _, _, members in alone]), upload(places))
    views = tuple(ViewJob(slot, slots, numbers(members), targets(members)) for slot, slots, members in shared)
    groups: dict[int, list[int]] = {}
    for row, blocks in enumerate(rests):
        if blocks:
            bucket = max(len(blocks) - 1, SMALL_REST_BLOCKS - 1).bit_length()
            groups.setdefault(bucket, []).append(row)
    gathers = []
    for _, members in sorted(groups.items()):
        width = max(len(rests[row]) for row in members)
        # Padding repeats the row's own first block: what is there is finite whenever the row itself is.
        table = np.array([[*rests[row], *[rests[row][0]] * (width - len(rests[row]))] for row in members])
        lengths = np.array([rest_slots[row] for row in members])
        hidden = torch.from_numpy(np.arange(width * size)[None, :] >= lengths[:, None]).to(device)
        mask = torch.zeros(len(members), 1, 1, width * size, dtype=pool.tensor.dtype, device=device)
        mask.masked_fill_(hidden[:, None, None, :], float("-inf"))
        blocks_index = torch.from_numpy(table.reshape(-1)).to(device)
        gathers.append(GatherJob(blocks_index, mask, numbers(members), targets(members)))
    return DecodePart(rows, max(partials), views, lone, tuple(gathers))
