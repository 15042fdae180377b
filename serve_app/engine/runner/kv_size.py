"""Sizing of the KV pool: a block has 2 * layers * block_size * kv_heads * head_dim numbers. Imports no torch.

Counts only layers with per-token KV: vLLM puts states of other layers into blocks of the same size. It divides layers
of several kinds into groups, and a block then has the KV of one group's layers.
"""

from collections import Counter
from typing import Any

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}


def kv_shape(config: Any) -> tuple[int, int, int]:
    """Return (layers, kv_heads, head_dim) of a decoder's config."""
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    return int(config.num_hidden_layers), kv_heads, head_dim


def keeps_kv(kind: str) -> bool:
    """Return whether a layer of this kind (of ``layer_types``) has per-token KV."""
    return ("attention" in kind and "linear" not in kind) or kind == "hybrid"


def kv_bytes_per_block(
    config: Any, dtype: str, block_size: int, tensor_ranks: int = 1, stages: int = 1, *, grouped: bool = False
) -> int:
    """Return the bytes of one block over all layers and ranks; every rank allocates as much as the fullest.

    The ``tensor_ranks`` divide the KV heads, at least one each; the ``stages`` divide the layers. ``grouped``: by
    vLLM's groups of layers. Raises ValueError for an unknown ``dtype``.
    """
    layers, kv_heads, head_dim = kv_shape(config)
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    sizes = Counter(filter(keeps_kv, kinds)).values()
    layers = sum(sizes) or layers
    if grouped and sizes:  # vLLM's rule: groups as large as the smallest kind, unless one of each kind wastes little
        layers = max(sizes) if max(sizes) < 1.5 * min(sizes) else min(sizes)
    layers, kv_heads = -(-layers // stages) * stages, -(-kv_heads // tensor_ranks) * tensor_ranks
    return 2 * layers * block_size * kv_heads * head_dim * dtype_bytes(dtype)


def dtype_bytes(dtype: str) -> int:
    """Return the bytes of one number. Raises ValueError for an unknown ``dtype``."""
    if dtype not in _DTYPE_BYTES:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPE_BYTES)}, not {dtype!r}")
    return _DTYPE_BYTES[dtype]


def blocks_in_budget(block_bytes: int, budget_bytes: int) -> int:
    """Return how many blocks fit. Raises ValueError if none does."""
    if budget_bytes < block_bytes:
        raise ValueError(f"{budget_bytes} bytes cannot hold one KV block of {block_bytes} bytes")
    return budget_bytes // block_bytes
