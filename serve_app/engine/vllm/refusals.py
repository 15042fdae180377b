"""Settings and models that are impossible with ``engine: vllm``: settings or a config in, sentences out.

A setting without effect is refused unless at its default, so that no user relies on it. Pure, and without vllm.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from serve_app.config.app import AppConfig
from serve_app.config.engine import NGRAM, VLLM_CPU_BLOCK_SIZE
from serve_app.engine.runner.kv_size import keeps_kv
from serve_app.engine.vllm.drafts import refused_drafts
from serve_app.engine.vllm.engine_args import refused_engine_args
from serve_app.engine.vllm.settings import VllmSettings

WINDOWED = frozenset({"mistral", "mixtral", "phi3", "starcoder2"})
"""Model types in which ``sliding_window``, unless null, applies to every layer."""

OTHER_WEIGHTS = frozenset({"quantization", "load_format", "hf_overrides", "model_loader_extra_config"})
"""Arguments of vLLM after which a checkpoint's files do not tell what is on a card; so does each with "offload"."""

_GIB = 1 << 30

STATES_ALONE = frozenset({"mamba", "mamba2", "falcon_mamba", "rwkv"})
"""Model types without attention."""


EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
"""Fields of a model with experts. Source: vLLM's ``ModelArchConfigConvertorBase``."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Refused settings, the reason ``because``, and the test ``applies`` for a refused value (default: any change)."""

    settings: tuple[str, ...]
    because: str
    applies: Callable[[AppConfig], bool] | None = None
    instead: str = "leave it out"


TABLE = (
    Refusal(
        ("host_cache_bytes",),
        "host memory is vLLM's own",
        instead="set kv_offloading_size",
    ),
    Refusal(
        ("save_ttl_s",),
        "saved prompts stay only within pin_budget, which is 0",
        lambda config: _changed(config, "save_ttl_s") and not config.pin_budget,
        instead="set pin_budget too",
    ),
    Refusal(
        ("num_speculative_tokens",),
        "no tokens are drafted",
        lambda config: _changed(config, "num_speculative_tokens") and not config.drafting,
        instead=f"set speculative_model: {NGRAM} too, or speculative_config",
    ),
    Refusal(
        ("kv_offloading_size",),
        "host memory keeps computed prefixes, and enable_prefix_caching is false",
        lambda config: config.kv_offloading_size is not None and not config.enable_prefix_caching,
    ),
)
"""In report order; remove a line once vLLM's engine supports its settings."""


def refused_settings(config: AppConfig, *, on_cpu: bool) -> list[str]:
    """Return a sentence for each setting that vLLM cannot follow."""
    refused = [
        f"{name}: with engine=vllm {refusal.because}; {refusal.instead}"
        for refusal in TABLE
        for name in refusal.settings
        if (_changed(config, name) if refusal.applies is None else refusal.applies(config))
    ]
    if on_cpu and config.block_size % VLLM_CPU_BLOCK_SIZE:
        refused.append(
            f"block_size: with engine=vllm on a CPU it must be a multiple of {VLLM_CPU_BLOCK_SIZE}; "
            f"set block_size: {VLLM_CPU_BLOCK_SIZE}"
        )
    if on_cpu and config.kv_offloading_size is not None:
        refused.append(
            "kv_offloading_size: vLLM's CPU build offloads no KV, and its pool is in host memory already; raise "
            "kv_cache_bytes instead"
        )
    if (
        on_cpu
        and config.pipeline_parallel_size > 1
        and (config.enforce_eager or config.lora_adapters or config.allow_runtime_lora)
    ):
        refused.append(
            "pipeline_parallel_size: vLLM's CPU build gives a stage its buffers while it warms up compiled code; leave "
            "enforce_eager and adapters out, or use tensor_parallel_size"
        )
    if on_cpu and config.tensor_parallel_size > 1 and config.engine_args.get("enable_expert_parallel"):
        refused.append(
            "engine_args.enable_expert_parallel: in vLLM's CPU build a rank that has only some experts crashes at its "
            "first token; leave it out"
        )
    if not on_cpu and config.dtype == "float32" and (config.lora_adapters or config.allow_runtime_lora):
        refused.append(
            "dtype: on a GPU vLLM's kernels for adapters compute in float16 or bfloat16; set dtype: bfloat16, or leave "
            "adapters out"
        )
    return refused + refused_engine_args(config.engine_args) + refused_drafts(config.drafting)


def refused_model(fields: Mapping[str, Any], config: AppConfig, *, on_cpu: bool) -> list[str]:
    """Return the conflicts between these settings and a model's config.json.

    Windows in some layers, beside full attention in others, cause none, but a cost: see ``costs_of_model``.
    """
    text: Mapping[str, Any] = fields.get("text_config") or fields
    kinds = set(text.get("layer_types") or text.get("layers_block_type") or ())
    states = sorted(kind for kind in kinds if not keeps_kv(kind) and kind not in ("mlp", "moe"))
    states += sorted(name for name in text if name.startswith(("mamba_", "ssm_", "linear_num_")))
    uniform = not kinds and text.get("model_type") in WINDOWED and text.get("sliding_window") is not None
    windowed = kinds == {"sliding_attention"} or uniform
    if text.get("model_type") in STATES_ALONE:
        return ["the model has no attention, so no per-token KV to route by; use one with some attention layers"]
    refused = []
    if on_cpu and any("mamba" in name or "ssm" in name for name in states):
        refused.append(
            f"on a CPU vLLM computes no Mamba layers ({states[0]}) with cached states; use a GPU, or a model with "
            "short convolutions beside its attention"
        )
    if on_cpu and text.get("model_type") == "gpt_oss" and config.num_threads != 1:
        refused.append("with several threads vLLM's CPU build computes attention sinks wrongly: set num_threads: 1")
    if on_cpu and config.data_parallel_size > 1 and any(text.get(name) for name in EXPERTS):
        refused.append(
            "data_parallel_size: in vLLM's CPU build ranks cannot exchange the tokens of their experts; use replicas"
        )
    moves = kv_moves(config) if states or windowed else []
    moves += ["pin_budget"] if states and config.pin_budget else []
    if moves:
        feature = states[0] if states else f"a window of {text.get('sliding_window')} in every layer"
        refused.append(
            f"{', '.join(moves)}: a model with {feature} has no complete KV of a prefix, so it is "
            f"{'neither copied nor kept' if states else 'not copied'}; leave it out"
        )
    return refused + refused_ranks(config, fields)


def costs_of_model(fields: Mapping[str, Any], config: AppConfig) -> list[str]:
    """Return a sentence if settings cost a model, by its config.json, more of the pool than their names say."""
    text: Mapping[str, Any] = fields.get("text_config") or fields
    mixed = {*(text.get("layer_types") or ())} >= {"sliding_attention", "full_attention"}
    window, moves = text.get("sliding_window"), kv_moves(config)
    if not (mixed or "sliding_window_pattern" in text) or not window or not moves:
        return []
    return [
        f"{', '.join(moves)}: with copies vLLM keeps all KV of the layers with a window of {window} "
        "tokens, not the window's alone, so the pool holds fewer prefixes; leave it out where that counts more"
    ]


def refused_card(settings: VllmSettings, card_bytes: int) -> list[str]:
    """Return the reason why a model cannot be on a replica's cards of that size; nothing if it might."""
    weights, kv, ranks = settings.weights_bytes, settings.kv_cache_bytes or 0, settings.ranks
    if 0.95 * weights + kv < ranks * card_bytes:  # a few layers, for drafts, may not be loaded
        return []
    cards = f"{ranks} GPU{'s' * (ranks > 1)} of {card_bytes / _GIB:.1f} GiB"
    needed = f"{weights / _GIB:.1f} GiB of weights" + f" and kv_cache_bytes of {kv / _GIB:.1f} GiB" * bool(kv)
    remedy = "raise tensor_parallel_size, or take a smaller or a quantized model"
    return [f"the model is too large for {cards}: {needed}; {'lower kv_cache_bytes, ' * bool(kv)}{remedy}"]


def refused_ranks(config: AppConfig, fields: Mapping[str, Any]) -> list[str]:
    """Return the reason why a model cannot be divided among the ranks, by its config.json; nothing if it can."""
    text: Mapping[str, Any] = fields.get("text_config") or fields
    ranks, stages = config.tensor_parallel_size, config.pipeline_parallel_size
    heads, kv_heads = text.get("num_attention_heads", ranks), text.get("num_key_value_heads") or ranks
    layers = text.get("num_hidden_layers", stages)
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        return [
            f"tensor_parallel_size={ranks} does not divide {heads} attention heads and {kv_heads} KV heads; lower it"
        ]
    return [f"pipeline_parallel_size={stages} is more than the model has layers; lower it"] if layers < stages else []


def kv_moves(config: AppConfig) -> list[str]:
    """Return the settings in use that need whole blocks copied out of the pool and into it."""
    names = ("kv_pull", "prewarm", "handover", "disk_cache_bytes", "object_cache_url")
    return [name for name in names if getattr(config, name)]


def _changed(config: AppConfig, name: str) -> bool:
    field = type(config).model_fields[name]
    return bool(getattr(config, name) != field.get_default(call_default_factory=True))
