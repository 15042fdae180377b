"""Sizes and switches of the built-in engine; another engine has its own settings."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from serve_app.cache.tiers.tiers import TierSettings

STALL_AFTER_S = 120.0
"""An engine with live requests is unhealthy if no step ends for this long."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Sizes and switches of the built-in engine; names are vLLM's where vLLM has them.

    ``pin_budget_blocks``: blocks that saves may keep; a request must fit in the rest of the pool. ``max_itl_s``: the
    longest step that includes a decode.
    """

    block_size: int = 16
    num_blocks: int = 4096
    max_model_len: int = 32768
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_waiting_requests: int = 256
    max_itl_s: float = math.inf
    enable_prefix_caching: bool = True
    dtype: str = "auto"
    device: str = "auto"
    num_threads: int = 0
    pin_budget_blocks: int = 0
    tenant_shares: Mapping[str, float] = field(default_factory=dict)
    max_loras: int = 4
    max_cpu_loras: int = 32
    max_lora_rank: int = 64
    model_fingerprint: str = ""
    tiers: TierSettings = field(default_factory=TierSettings)
