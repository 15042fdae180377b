"""The paged KV pool, a step over it, and what an attention backend is.

Slot ``block * block_size + i`` of a layer is token i of a block: keys and values [slots, kv_heads, head_dim].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from serve_app.engine.step import Segment


class KvPool:
    """The KV of all blocks: ``tensor`` [layers, 2, blocks, block_size, kv_heads, head_dim], zeros at first."""

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
        self.num_blocks = num_blocks
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


class AttentionBackend(Protocol):
    """One way to attend a step's rows to the pool, on one kind of device."""

    name: str

    def plan(self, pool: KvPool, segments: Sequence[Segment]) -> PagedStep:
        """Lay ``segments`` out as one packed row; zeroes the unused part of every block that a segment begins.

        All layers use the plan.
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
    ``logit_rows``: the packed rows whose token is wanted. ``plan`` is the backend's own: what its rows read, and how.
    """

    pool: KvPool
    backend: AttentionBackend
    order: tuple[int, ...]
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    slots: torch.Tensor
    logit_rows: torch.Tensor
    plan: Any = None


def write_kv(step: PagedStep, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
    """Write a step's ``key`` and ``value`` [T, kv_heads, head_dim] to its slots of the pool's layer."""
    real = len(step.slots)
    for slots, fresh in ((step.pool.keys[layer], key), (step.pool.values[layer], value)):
        slots.index_copy_(0, step.slots, fresh[:real] if real < len(fresh) else fresh)
