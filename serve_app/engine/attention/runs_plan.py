"""How the default backend reads the pool: prefill parts, and decode jobs of long runs and of the scattered rest.

Owns the plan of a step's attention by views (once for all sequences that share a run) and padded gathers. Knows
nothing of the model. Segments flow in, a PagedStep with its parts flows out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from serve_app.engine.attention.paging import (
    DecodePart,
    GatherJob,
    KvPool,
    LoneRuns,
    PagedStep,
    PrefillPart,
    Rows,
    ViewJob,
    lay_out,
)
from serve_app.engine.step import Segment

LONG_RUN_TOKENS = 256
"""From this length on a decode reads a run in place; below, one gather for many sequences costs less."""

SHAPE_TOKENS = 128
"""Decodes read runs in place in multiples of this: few shapes, few kernels compiled."""

PIECES_IN_PLACE = 4
"""A chunk whose past lies in more runs copies it together: every run is a call, and rounds the result once more."""

SMALL_REST_BLOCKS = 16
"""Rests up to this many blocks share one padded gather; longer ones are grouped by powers of two."""


def plan_runs(pool: KvPool, segments: Sequence[Segment]) -> PagedStep:
    """Lay ``segments`` out as one packed row and plan what each part reads."""
    step = lay_out(pool, segments)
    device, size = pool.tensor.device, pool.block_size
    singles, prefills, row = [], [], 0
    for i in step.order:
        if len(segments[i].token_ids) == 1:
            singles.append(segments[i])
        else:
            prefills.append(_plan_prefill(segments[i], row, size, device))
        row += len(segments[i].token_ids)
    return replace(step, decode=_plan_decode(pool, singles) if singles else None, prefills=tuple(prefills))


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
