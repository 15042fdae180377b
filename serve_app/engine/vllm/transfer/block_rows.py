"""Read and write blocks of an engine's layers, in its order, as rows of bytes. Knows torch and no vllm."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from serve_app.cache.kv_chain import Row


class BlockRows:
    """The layers' tensors; their first dimension is the pool's blocks. ``block_bytes``: bytes of a row."""

    def __init__(self, layers: Mapping[str, torch.Tensor], num_blocks: int | None = None) -> None:
        """Raise ValueError if the layers' KV differs in shape or dtype: one format cannot describe a block then.

        ``num_blocks``: the pool's; kernels of a GPU may divide each into equal parts, which follow each other.
        """
        if num_blocks is not None:
            whole = {name: _divided(layer, num_blocks) for name, layer in layers.items()}
            layers = {name: layer[:, 0] if layer.shape[1] == 1 else layer for name, layer in whole.items()}
        kinds = {(layer.dtype, layer.shape) for layer in layers.values()}
        if len(kinds) != 1:
            raise ValueError(f"the layers' KV is of {len(kinds)} kinds")
        ((self.dtype, shape),) = kinds
        self.names = tuple(layers)
        self.shape = tuple(shape[1:])
        self._layers = tuple(layers.values())
        self._values = int(np.prod(self.shape))
        self._width = self.dtype.itemsize * self._values
        self.block_bytes = self._width * len(self._layers)

    def read(self, block_ids: Sequence[int]) -> Row:
        """Return the rows [blocks, block_bytes] of blocks."""
        rows = np.empty((len(block_ids), self.block_bytes), np.uint8)
        for index, layer in enumerate(self._layers):
            own = layer[list(block_ids)].cpu().reshape(len(block_ids), self._values).contiguous().view(torch.uint8)
            rows[:, index * self._width : (index + 1) * self._width] = own.numpy()
        return rows

    def write(self, block_ids: Sequence[int], rows: Row) -> None:
        """Write rows into blocks. Raises ValueError, changing nothing, if their shape does not fit."""
        if rows.shape != (len(block_ids), self.block_bytes):
            raise ValueError(f"rows of shape {rows.shape} for {len(block_ids)} blocks")
        for index, layer in enumerate(self._layers):
            own = np.ascontiguousarray(rows[:, index * self._width : (index + 1) * self._width])
            layer[list(block_ids)] = (
                torch.from_numpy(own).view(self.dtype).reshape(len(block_ids), *self.shape).to(layer.device)
            )


def _divided(layer: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Return a view [num_blocks, parts, ...] of a layer [num_blocks * parts, ...] of any strides."""
    parts = len(layer) // num_blocks
    first, *rest = layer.stride()
    return layer.as_strided((num_blocks, parts, *layer.shape[1:]), (parts * first, first, *rest))
