"""Pairs of model and drafter for the speculation benchmark, cut from the built-in ``small`` checkpoint.

The lower layers of a model with the same embeddings are a drafter of the same vocabulary. Random weights agree with
nobody, so in ``agreeing`` the model's upper layers are damped until they change little: a stand-in for a trained
pair, and said to be one. Knows nothing of engines.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

LOWER_LAYERS = 2
DAMPING = 0.03
_OUTPUTS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


def build_pairs(model: Path, directory: Path) -> dict[str, tuple[Path, Path]]:
    """Write the checkpoints below ``directory``; return (model, drafter) by name of the pair."""
    layers = int(json.loads((model / "config.json").read_text())["num_hidden_layers"])
    damped = _variant(model, directory / "damped", layers, DAMPING)
    return {
        "same": (model, model),
        "agreeing": (damped, _variant(damped, directory / "damped_lower", LOWER_LAYERS)),
        "lower_layers": (model, _variant(model, directory / "lower", LOWER_LAYERS)),
    }


def _variant(source: Path, target: Path, layers: int, damping: float = 1.0) -> Path:
    """Copy a checkpoint with its first ``layers`` layers, those above the lower ones scaled by ``damping``."""
    shutil.copytree(source, target)
    kept = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        layer = int(name.split(".")[2]) if name.startswith("model.layers.") else 0
        if layer < layers:
            scaled = layer >= LOWER_LAYERS and name.endswith(_OUTPUTS)
            kept[name] = tensor * np.float32(damping) if scaled else tensor
    save_file(kept, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "layer_types": config["layer_types"][:layers]}
    (target / "config.json").write_text(json.dumps(config, indent=2))
    return target
