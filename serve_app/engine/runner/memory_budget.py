"""The KV pool's part of GPU memory: the utilization minus weights (measured on torch's meta device) and one step."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from serve_app.engine.attention.paging import GATHER_TOKENS
from serve_app.engine.lora.layers import adaptable_layers
from serve_app.engine.runner.kv_size import kv_shape

_SLACK_BYTES = 512 * 1024**2
"""Workspaces of the matrix library, and memory that the allocator cannot reuse."""

_SAMPLING_BYTES = 64
"""Per row and vocabulary token: logits, their float64 copy, its sort and sums, the noise."""

_LIVE_TENSORS = 8
"""Generous estimate of how many of a layer's widest tensors live at once."""


@dataclass(frozen=True, slots=True)
class Work:
    """Concurrent work of a replica. ``lora_ranks``: sum of the ranks of all adapters in the batch; 0 without LoRA."""

    batched_tokens: int
    sequences: int
    lora_ranks: int


def weight_bytes(config: Any, dtype: torch.dtype, lora_ranks: int = 0) -> int:
    """Return the bytes of a model's weights, shared ones counted once, and of adapters with ``lora_ranks`` in all."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    elements = sum(weight.numel() for weight in model.parameters())
    if lora_ranks:
        widths = sum(layer.in_features + layer.out_features for layer in adaptable_layers(model).values())
        elements += lora_ranks * widths
    return int(elements * dtype.itemsize)


def step_bytes(config: Any, dtype: torch.dtype, work: Work) -> int:
    """Return the bytes one step may need besides weights and KV: activations, copied KV, sampling."""
    _, kv_heads, head_dim = kv_shape(config)
    hidden = int(config.hidden_size)
    widest = max(int(getattr(config, "intermediate_size", None) or 4 * hidden), hidden)
    activations = work.batched_tokens * _LIVE_TENSORS * widest * dtype.itemsize
    copied = 2 * GATHER_TOKENS * kv_heads * head_dim * dtype.itemsize
    sampling = work.sequences * int(config.vocab_size) * _SAMPLING_BYTES
    return activations + copied + sampling + _SLACK_BYTES


def kv_budget_bytes(memory: tuple[int, int], utilization: float, config: Any, dtype: torch.dtype, work: Work) -> int:
    """Return the bytes left for KV. ``memory``: (free, total) of the device.

    ``utilization``: this replica's part of the whole device, as in vLLM. Raises ValueError if weights and a step leave
    none.
    """
    free, total = memory
    weights, step = weight_bytes(config, dtype, work.lora_ranks), step_bytes(config, dtype, work)
    allowed = min(int(total * utilization), free)
    left = allowed - weights - step
    if left <= 0:
        raise ValueError(
            f"gpu_memory_utilization={utilization:g} allows {_gib(allowed)} of {_gib(total)} ({_gib(free)} free); the "
            f"weights take {_gib(weights)} and a step up to {_gib(step)}, which leaves no KV: raise it, lower "
            "max_num_batched_tokens or max_num_seqs, or set kv_cache_bytes"
        )
    return left


def _gib(count: int) -> str:
    return f"{count / 1024**3:.1f} GiB"
