"""Models and drafters for the speculation benchmark, cut from a built-in checkpoint.

Random weights agree with nobody, so models that shall agree with a drafter have their upper layers damped: a stand-in
for a trained pair.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

LOWER_LAYERS = 2
DAMPING, EAGLE_DAMPING = 0.03, 0.003
EMBEDDING_SCALE = 0.1
_OUTPUTS = ("o_proj.weight", "down_proj.weight")
_KEPT = (
    "head_dim", "hidden_act", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "rms_norm_eps", "rope_parameters", "vocab_size", "max_position_embeddings",
)  # fmt: skip


def build_pairs(model: Path, directory: Path) -> dict[str, tuple[Path, Path]]:
    """Write pairs below ``directory``; return (model, drafter) by name."""
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
            kept[name] = tensor * damping if scaled else tensor
    save_file(kept, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "layer_types": config["layer_types"][:layers]}
    (target / "config.json").write_text(json.dumps(config, indent=2))
    return target


def eagle_pair(model: Path, directory: Path) -> tuple[Path, Path]:
    """Write a Llama of ``model``'s weights with damped upper layers, and an EAGLE-3 head that is its first layer."""
    base = directory / "eagle_base"
    shutil.copytree(model, base)
    tensors = load_file(model / "model.safetensors")
    made = {}
    for name, tensor in tensors.items():
        layer = int(name.split(".")[2]) if name.startswith("model.layers.") else 0
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            continue
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            # A Llama has no norms on queries and keys; random projections of normed input are near their size anyway.
            tensor = tensor * tensors[name.replace("_proj", "_norm")].mean()
        if layer and name.endswith(_OUTPUTS):
            tensor = tensor * EAGLE_DAMPING
        if name == "model.embed_tokens.weight":
            tensor = tensor * EMBEDDING_SCALE
        made[name] = tensor.contiguous()
    save_file(made, base / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    kept = {name: value for name, value in config.items() if name in _KEPT or name.endswith("_token_id")}
    kept |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32"}
    kept |= {"num_hidden_layers": config["num_hidden_layers"], "tie_word_embeddings": True}
    (base / "config.json").write_text(json.dumps(kept, indent=2))
    return base, _first_layer(base, directory / "eagle_agreeing")


def _first_layer(base: Path, target: Path) -> Path:
    """Write a head that is the first layer of ``base`` over the tokens' embeddings, and reads no states."""
    tensors = load_file(base / "model.safetensors")
    config = json.loads((base / "config.json").read_text())
    hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
    first = "model.layers.0."
    made = {
        "fc.weight": torch.eye(hidden).repeat(1, 3) / 3,
        "norm.weight": tensors["model.norm.weight"],
        "midlayer.hidden_norm.weight": torch.zeros(hidden),
    }
    for name in ("input_layernorm", "post_attention_layernorm", "self_attn.o_proj"):
        made[f"midlayer.{name}.weight"] = tensors[f"{first}{name}.weight"]
    for name in ("gate_proj", "up_proj", "down_proj"):
        made[f"midlayer.mlp.{name}.weight"] = tensors[f"{first}mlp.{name}.weight"]
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = tensors[f"{first}self_attn.{name}.weight"]
        made[f"midlayer.self_attn.{name}.weight"] = torch.cat([weight, torch.zeros_like(weight)], dim=1)
    described = {name: config[name] for name in _KEPT if name in config} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": config["vocab_size"],
        "eagle_aux_hidden_state_layer_ids": [1, layers // 2, layers - 1],
        "norm_before_residual": True,
        "tie_word_embeddings": False,
    }
    target.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in made.items()}, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(described, indent=2))
    return target
