"""Sizes and switches of the built-in engine; another engine has its own settings."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from serve_app.config.cache import CacheSection
from serve_app.config.engine import MAX_MODEL_LEN, EngineSection, LoraSection

STALL_AFTER_S = 120.0
"""An engine with live requests is unhealthy if no step ends for this long."""

_CACHE, _ENGINE, _LORA = CacheSection(), EngineSection(), LoraSection()


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Sizes and switches of the built-in engine; names are vLLM's where vLLM has them.

    ``pin_budget_blocks``: blocks that saves may keep; a request must fit in the rest of the pool. ``max_itl_s``: the
    longest step that includes a decode.
    """

    block_size: int = _CACHE.block_size
    num_blocks: int = 4096
    max_model_len: int = MAX_MODEL_LEN
    max_num_seqs: int = _ENGINE.max_num_seqs
    max_num_batched_tokens: int = _ENGINE.max_num_batched_tokens
    max_waiting_requests: int = _ENGINE.max_waiting_requests
    max_itl_s: float = math.inf
    enable_prefix_caching: bool = True
    dtype: str = "auto"
    device: str = "auto"
    num_threads: int = 0
    pin_budget_blocks: int = 0
    tenant_shares: Mapping[str, float] = field(default_factory=dict)
    max_loras: int = _LORA.max_loras
    max_cpu_loras: int = _LORA.max_cpu_loras
    max_lora_rank: int = _LORA.max_lora_rank
    model_fingerprint: str = ""
    tiers: CacheSection = field(default_factory=CacheSection)
