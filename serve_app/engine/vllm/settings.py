"""Sizes and switches of a vLLM engine; names are vLLM's where vLLM has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """What a replica asks of vLLM.

    ``model``: a checkpoint's directory; ``end_token_ids``: what ends an answer. ``block_bytes``: of one block's KV.
    ``num_blocks`` None: as many as ``kv_cache_bytes`` holds, or as ``gpu_memory_utilization`` leaves room for; not on a
    CPU. ``dtype``: "auto" is the model's own.
    ``model_fingerprint``: of config and weights; ``transfer``: whether KV comes from and goes to other replicas, or is
    kept; ``pin_budget``: how much may be, a part of the pool below 1, else blocks.
    ``lora``: whether there may be adapters. ``num_threads``: of the CPU build. ``tenant_shares``: weights by tenant.
    """

    model: str
    end_token_ids: tuple[int, ...] = ()
    block_size: int = 32
    block_bytes: int = 0
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    max_model_len: int = 32768
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_waiting_requests: int = 256
    enable_prefix_caching: bool = True
    dtype: str = "auto"
    model_fingerprint: str = ""
    transfer: bool = False
    pin_budget: float = 0.0
    enforce_eager: bool = False
    num_threads: int = 1
    lora: bool = False
    max_loras: int = 4
    max_cpu_loras: int = 32
    max_lora_rank: int = 64
    tenant_shares: Mapping[str, float] = field(default_factory=dict)
    labels: tuple[tuple[str, str], ...] = ()
