"""Arithmetic for the number of cached prefixes, from a model's config, memory and working set.

Weights are counted as for a Llama-style decoder, with experts if the config has them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from router.settings import DEFAULTS
from serve_app.engine.runner.kv_size import dtype_bytes, kv_bytes_per_block, kv_shape

BLOCK_TOKENS = DEFAULTS.block_size
"""The default of `block_size`."""


@dataclass(frozen=True, slots=True)
class KvRoom:
    """One replica's memory. ``tokens``: of KV, in whole blocks."""

    bytes_per_token: int
    weights_bytes: int
    kv_bytes: int
    tokens: int


@dataclass(frozen=True, slots=True)
class KvPlan:
    """A plan. ``hit_rate``: expected over equally popular prefixes, each at its home replica.

    ``replicas_needed``: for the whole working set, 0 if a replica cannot hold a single prefix.
    """

    bytes_per_token: int
    prefix_bytes: int
    weights_bytes: int
    kv_bytes: int
    tokens_per_replica: int
    prefixes_per_replica: int
    hit_rate: float
    replicas_needed: int


_NEEDED = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
_OTHERS = ("num_key_value_heads", "head_dim", "num_local_experts", "num_experts", "moe_intermediate_size")


def _check(fields: Mapping[str, Any]) -> None:
    """Raise ValueError for a config with a needed size that is missing, or one that is no size."""
    experts = fields.get("num_local_experts") or fields.get("num_experts")
    needed = (*_NEEDED, *(() if experts and fields.get("moe_intermediate_size") else ("intermediate_size",)))
    for name in (*needed, *_OTHERS):
        size = fields.get(name) or None
        if size is None and name in needed:
            raise ValueError(f"the config lacks {name}, which a language model's has")
        if size is not None and (type(size) is not int or size < 1):
            raise ValueError(f"{name} in the config must be a whole number above 0")


def weights_bytes(fields: Mapping[str, Any], dtype: str) -> int:
    """Return the bytes of a decoder's weights. Raises ValueError for a config without a needed size."""
    _check(fields)
    config = SimpleNamespace(**fields)
    layers, kv_heads, head_dim = kv_shape(config)
    hidden, heads = int(fields["hidden_size"]), int(fields["num_attention_heads"])
    experts = int(fields.get("num_local_experts") or fields.get("num_experts") or 0)
    inner = int((fields.get("moe_intermediate_size") if experts else None) or fields["intermediate_size"])
    attention = 2 * hidden * head_dim * (heads + kv_heads)
    feed_forward = 3 * hidden * inner * max(1, experts) + hidden * experts
    embeddings = int(fields["vocab_size"]) * hidden * (1 if fields.get("tie_word_embeddings") else 2)
    return (embeddings + layers * (attention + feed_forward + 2 * hidden) + hidden) * dtype_bytes(dtype)


def kv_room(fields: Mapping[str, Any], dtype: str, memory_bytes: int, ranks: tuple[int, int] = (1, 1)) -> KvRoom:
    """Return the KV capacity of a replica with ``memory_bytes`` in all ranks. ``fields``: of config.json.

    ``ranks``: a replica's tensor-parallel ranks and pipeline stages.
    Raises ValueError for a config without a needed size, and for an unknown ``dtype``.
    """
    weights = weights_bytes(fields, dtype)
    block_bytes = kv_bytes_per_block(SimpleNamespace(**fields), dtype, BLOCK_TOKENS, *ranks)
    kv_bytes = max(0, memory_bytes - weights)
    return KvRoom(block_bytes // BLOCK_TOKENS, weights, kv_bytes, kv_bytes // block_bytes * BLOCK_TOKENS)


def plan_kv(room: KvRoom, prefixes: int, prefix_tokens: int, replicas: int = 1) -> KvPlan:
    """Plan ``prefixes`` of ``prefix_tokens`` over equal replicas."""
    fitting = room.tokens // (-(-prefix_tokens // BLOCK_TOKENS) * BLOCK_TOKENS)
    return KvPlan(
        bytes_per_token=room.bytes_per_token,
        prefix_bytes=room.bytes_per_token * prefix_tokens,
        weights_bytes=room.weights_bytes,
        kv_bytes=room.kv_bytes,
        tokens_per_replica=room.tokens,
        prefixes_per_replica=fitting,
        hit_rate=min(1.0, fitting * replicas / prefixes),
        replicas_needed=-(-prefixes // fitting) if fitting else 0,
    )
