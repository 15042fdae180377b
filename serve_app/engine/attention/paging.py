"""The paged KV pool, and a step over it: one packed row of T tokens, with its sequences one after another.

Slot ``block * block_size + i`` of a layer holds token i of a block: keys and values [slots, kv_heads, head_dim]. With
blocks [7, 3] of 16, positions 0 to 20 have their KV in slots 112 to 127 and 48 to 52; slots 53 to 63 are stale.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from serve_app.engine.attention.reads import Read, plan_reads
from serve_app.engine.step import Segment

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
