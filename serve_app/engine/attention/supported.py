"""Decide by a model's config whether this engine computes it. Imports no torch."""

import json
from pathlib import Path
from typing import Any


class UnsupportedModel(ValueError):
    """The model needs attention that this engine does not compute."""


def refuse_unsupported(config: Any, model: Any = None) -> None:
    """Raise UnsupportedModel unless every layer is plain causal softmax attention. ``model``: the loaded module."""
    name = getattr(config, "model_type", "this model")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise UnsupportedModel(f"{name}: layers of type {', '.join(sorted(kinds - {'full_attention'}))}")
    if not getattr(config, "layer_types", None) and getattr(config, "sliding_window", None):
        raise UnsupportedModel(f"{name}: sliding_window={config.sliding_window}")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        # One scale for the whole packed row, set by its longest sequence: neighbours would change each other.
        raise UnsupportedModel(f"{name}: rope_type={rope['rope_type']}")
    if getattr(config, "attn_logit_softcapping", None):
        raise UnsupportedModel(f"{name}: soft-capped attention logits")
    if getattr(config, "kv_lora_rank", None) or getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name}: not a decoder with plain keys and values")
    if model is not None and any(part.endswith("sinks") for part, _ in model.named_parameters()):
        raise UnsupportedModel(f"{name}: attention sinks")


def served_config(path: Path) -> Any:
    """Return a checkpoint's config if this engine computes its model. Raises UnsupportedModel and OSError."""
    from transformers import AutoConfig  # takes seconds, and imports torch
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as DECODERS

    file = path / "config.json"
    fields = json.loads(file.read_text())
    kind, architecture = fields.get("model_type"), (fields.get("architectures") or [None])[0]
    try:
        config = AutoConfig.from_pretrained(str(path), local_files_only=True)
    except (ValueError, KeyError) as error:
        raise UnsupportedModel(f"{file}: transformers does not know the model_type {kind!r}") from error
    if kind not in DECODERS:
        raise UnsupportedModel(f"{file}: model_type {kind!r} is not a decoder that generates text")
    if architecture != DECODERS[kind] and architecture in DECODERS.values():
        raise UnsupportedModel(
            f"{file} names the model_type {kind!r} and the architecture {architecture!r}, which is another model's; "
            "copy the checkpoint's own config.json"
        )
    refuse_unsupported(config)
    return config
