"""Jobs for the connector, which travel in one-token requests, and the rows of bytes that they copy.

Blocks of an engine's layers are such rows, in its order. Knows torch and no vllm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from math import prod
from operator import itemgetter
from typing import Any, Literal

import msgspec
import numpy as np
import torch

from serve_app.cache.kv_chain import Row
from serve_app.engine.vllm.scheduling.tenant import tenant_args


class BlockRows:
    """The layers' tensors, of any shapes; their first dimension is the pool's blocks. ``block_bytes``: of a row.

    ``layout``: what a row holds, in its order. Rows of equal layouts fit each other.
    """

    def __init__(self, layers: Mapping[str, torch.Tensor], num_blocks: int | None = None) -> None:
        """``num_blocks``: the pool's; kernels of a GPU may divide each into equal parts, which follow each other."""
        if num_blocks is not None:
            whole = {name: _divided(layer, num_blocks) for name, layer in layers.items()}
            layers = {name: layer[:, 0] if layer.shape[1] == 1 else layer for name, layer in whole.items()}
        self._layers = tuple(layers.values())
        kinds = [f"{str(layer.dtype).removeprefix('torch.')}{list(layer.shape[1:])}" for layer in self._layers]
        named = groupby(zip(kinds, layers, strict=True), itemgetter(0))
        self.layout = "; ".join(f"{kind} of {', '.join(name for _, name in same)}" for kind, same in named)
        self._widths = [layer.itemsize * prod(layer.shape[1:]) for layer in self._layers]
        self.block_bytes = sum(self._widths)

    def read(self, block_ids: Sequence[int]) -> Row:
        """Return the rows [blocks, block_bytes] of blocks."""
        rows = np.empty((len(block_ids), self.block_bytes), np.uint8)
        for layer, own in self._parts(rows):
            own[:] = layer[list(block_ids)].cpu().flatten(1).contiguous().view(torch.uint8).numpy()
        return rows

    def write(self, block_ids: Sequence[int], rows: Row) -> None:
        """Write rows into blocks. Raises ValueError, changing nothing, if their shape does not fit."""
        if rows.shape != (len(block_ids), self.block_bytes):
            raise ValueError(f"rows of shape {rows.shape} for {len(block_ids)} blocks")
        for layer, own in self._parts(rows):
            values = torch.from_numpy(np.ascontiguousarray(own)).view(layer.dtype)
            layer[list(block_ids)] = values.view(len(block_ids), *layer.shape[1:]).to(layer.device)

    def _parts(self, rows: Row) -> Iterator[tuple[torch.Tensor, Row]]:
        """Yield each layer with its columns of ``rows``."""
        end = 0
        for layer, width in zip(self._layers, self._widths, strict=True):
            end += width
            yield layer, rows[:, end - width : end]


def _divided(layer: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Return a view [num_blocks, parts, ...] of a layer [num_blocks * parts, ...] of any strides."""
    parts = len(layer) // num_blocks
    first, *rest = layer.stride()
    return layer.as_strided((num_blocks, parts, *layer.shape[1:]), (parts * first, first, *rest))


LAYOUT_FILE = "kv_layout.json"
"""File of each rank's description of its part of the blocks: a ``KvPart``."""


def rank_file(file: str, rank: int) -> str:
    """Return the path of a rank's own part of ``file``."""
    return f"{file}.{rank}"


class TransferJob(msgspec.Struct, frozen=True):
    """``kind``, for the prompt's blocks ``first`` to ``end`` - 1 of ``tenant``. ``file``: their rows, a file per rank.

    ``public_tokens``: number of the prompt's public tokens.
    "pin": keep them in the pool, under the name ``file``, until an "unpin" with this name.
    """

    kind: Literal["export", "import", "pin", "unpin"]
    file: str
    first: int = 0
    end: int = 0
    tenant: str = ""
    public_tokens: int = 0

    def to_extra_args(self) -> dict[str, Any]:
        """Return this job as ``SamplingParams.extra_args``."""
        return {"kv_transfer_params": {"warmpath": msgspec.to_builtins(self)}, **tenant_args(self.tenant)}

    @classmethod
    def of_params(cls, params: Mapping[str, Any] | None) -> TransferJob | None:
        """Return the job in a request's ``kv_transfer_params``; None for an ordinary request."""
        packed = (params or {}).get("warmpath")
        return None if packed is None else msgspec.convert(packed, cls)
