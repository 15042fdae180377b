"""What there cannot be with ``engine: vllm``: settings, a checkpoint's config or a request in, sentences out.

A setting without effect is refused unless at its default, so that nobody relies on it. Pure, and without vllm.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from serve_app.config.app import AppConfig
from serve_app.config.engine import VLLM_CPU_BLOCK_SIZE
from serve_app.engine.protocol import EngineRequest
from serve_app.engine.runner.kv_size import keeps_kv

WINDOWED = frozenset({"mistral", "mixtral", "phi3", "starcoder2"})
"""Model types whose ``sliding_window``, where it is not null, is that of every layer."""

STATES_ALONE = frozenset({"mamba", "mamba2", "falcon_mamba", "rwkv"})
"""Model types without attention."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Settings that are refused, ``because`` of what; ``wanted`` says whether one asks for it (default: any change)."""

    settings: tuple[str, ...]
    because: str
    wanted: Callable[[AppConfig], bool] | None = None
    instead: str = "leave it out"


TABLE = (
    Refusal(
        ("host_cache_bytes", "disk_cache_bytes", "disk_cache_dir", "disk_queue_bytes", "tier_load_ratio"),
        "what vLLM evicts from its pool is gone, there are no tiers below it",
    ),
    Refusal(
        ("save_ttl_s",),
        "saved prompts stay only where pin_budget says how much of the pool they may keep",
        lambda config: _changed(config, "save_ttl_s") and not config.pin_budget,
        instead="set pin_budget too",
    ),
    Refusal(
        ("public_prompts", "prompts_dir"),
        "vLLM divides its cache by tenant from the first token on",
        instead="put tenants that may share their KV in one trust_group",
    ),
    Refusal(
        ("tenants[].store_kv",),
        "every request's KV stays in vLLM's cache until it is evicted",
        lambda config: not all(tenant.store_kv for tenant in config.tenants),
    ),
    Refusal(
        ("max_itl_ms",),
        "vLLM sizes its steps in tokens",
        instead="lower max_num_batched_tokens",
    ),
    Refusal(
        ("speculative_model", "num_speculative_tokens"),
        "an answer would depend on the drafts, and could not go on elsewhere",
    ),
)
"""In the order in which they are told; a line goes when vLLM's engine can do it."""


def refused_settings(config: AppConfig, *, on_cpu: bool) -> list[str]:
    """Return a sentence for each setting that vLLM cannot follow; none where all is well."""
    found = [
        f"{name}: with engine=vllm {refusal.because}; {refusal.instead}"
        for refusal in TABLE
        for name in refusal.settings
        if (_changed(config, name) if refusal.wanted is None else refusal.wanted(config))
    ]
    if on_cpu and config.block_size % VLLM_CPU_BLOCK_SIZE:
        found.append(
            f"block_size: with engine=vllm on a CPU it is a multiple of {VLLM_CPU_BLOCK_SIZE}; "
            f"set block_size: {VLLM_CPU_BLOCK_SIZE}"
        )
    return found


def refuse_unmapped(request: EngineRequest) -> None:
    """Raise ValueError for what of a request vLLM has no counterpart of."""
    if request.scope.public_blocks:
        raise ValueError("public prompts are not available with engine=vllm")
    if not request.store_kv:
        raise ValueError("with engine=vllm every request's KV stays in the cache; leave store_kv out")


def refused_model(fields: Mapping[str, Any], config: AppConfig, *, on_cpu: bool) -> list[str]:
    """Return why these settings and a model do not go together, from its config.json; nothing where they do.

    A window in some layers, beside full attention in others, is no reason for anything: vLLM keeps all their KV when
    its hybrid cache manager is off.
    """
    text: Mapping[str, Any] = fields.get("text_config") or fields
    kinds = set(text.get("layer_types") or text.get("layers_block_type") or ())
    states = sorted(kind for kind in kinds if not keeps_kv(kind) and kind not in ("mlp", "moe"))
    states += sorted(name for name in text if name.startswith(("mamba_", "ssm_", "linear_num_")))
    uniform = not kinds and text.get("model_type") in WINDOWED and text.get("sliding_window") is not None
    windowed = kinds == {"sliding_attention"} or uniform
    found = []
    if text.get("model_type") in STATES_ALONE:
        return ["the model has no attention, so no KV by token to route by; use one with some layers of it"]
    if on_cpu and any("mamba" in name or "ssm" in name for name in states):
        found.append(
            f"on a CPU vLLM computes no Mamba layers ({states[0]}) with cached states; use a GPU, or a model with "
            "short convolutions or linear attention beside its attention"
        )
    moves = [name for name in ("kv_pull", "prewarm", "handover", "pin_budget") if getattr(config, name)]
    if moves and (states or windowed):
        what = states[0] if states else f"a window of {text.get('sliding_window')} in every layer"
        found.append(
            f"{', '.join(moves)}: the KV of a prefix is not whole in a model with {what}, so it is neither copied nor "
            "kept; leave it out"
        )
    return found


def _changed(config: AppConfig, name: str) -> bool:
    field = type(config).model_fields[name]
    return bool(getattr(config, name) != field.get_default(call_default_factory=True))
