"""Where each token's KV lies: the index tensors of one step, built once and used by every layer.

Owns the KV pool tensor, the scratch memory, and the layout of a step with the types of its plans. Which rows read
what how is a backend's plan. Knows nothing of the model. Segments flow in, a PagedStep flows out.
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

PADDED_ROWS = 16
"""A step of more than 64 tokens is padded to a multiple of this: few shapes, few kernels compiled."""


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


@dataclass(frozen=True, slots=True)
class Heads:
    """What a backend has to cope with: the sizes of one model and its pool."""

    query: int
    kv: int
    dim: int
    block_size: int
    dtype: torch.dtype


class AttentionBackend(Protocol):
    """One way to attend a step's rows to the pool, on one kind of device."""

    name: str
    in_graphs: bool
    """Whether sizes are read on the device alone, so that a captured decode step is right for other lengths."""

    def plan(self, pool: KvPool, segments: Sequence[Segment], rows: int = 0) -> PagedStep:
        """Lay ``segments`` out as one packed row; zeroes the unused part of every block a segment begins.

        ``rows``: pad a step of single tokens to so many rows (only with ``in_graphs``). All layers use the plan.
        """

    def attend(
        self, step: PagedStep, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Write the step's ``key`` and ``value`` [T, kv_heads, head_dim], then attend ``query`` [T, heads, head_dim].

        Returns [T, heads, head_dim]. Rows after the real ones are padding, and written nowhere.
        """


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


def write_kv(step: PagedStep, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
    """Write a step's ``key`` and ``value`` [T, kv_heads, head_dim] to its slots of the pool's layer."""
    real = len(step.slots)
    for slots, fresh in ((step.pool.keys[layer], key), (step.pool.values[layer], value)):
        slots.index_copy_(0, step.slots, fresh[:real] if real < len(fresh) else fresh)


def lay_out(pool: KvPool, segments: Sequence[Segment]) -> PagedStep:
    """Lay ``segments`` out as one packed row, without a backend's plan; zeroes the unused part of every fresh block.

    (Stale numbers beyond a sequence's end are masked out, but a stale NaN would survive the mask.)
    """
    device, size = pool.tensor.device, pool.block_size
    order = sorted(range(len(segments)), key=lambda i: len(segments[i].token_ids) > 1)
    ids, positions, slots, last_rows = [], [], [], []
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
    )
