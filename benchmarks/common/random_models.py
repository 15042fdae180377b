"""Shapes of known models to be filled with random weights on the device: `--model random:NAME`.

Owns their configs. Nothing is downloaded, and only config.json is written, into a directory of the caller.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PREFIX = "random:"

_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "hidden_act": "silu"}

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        **_LLAMA,
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "llama-tiny": {
        **_LLAMA,
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
}
"""Source: the configs that the models were published with; "llama-tiny" is for tests."""


def write_config(name: str, directory: Path) -> dict[str, Any]:
    """Write config.json of shape ``name`` into ``directory`` and return it. Raises ValueError on an unknown name."""
    if name not in SHAPES:
        raise ValueError(f"--model {PREFIX}{name}: the shapes are {', '.join(SHAPES)}")
    (directory / "config.json").write_text(json.dumps(SHAPES[name], indent=2))
    return SHAPES[name]
