"""EAGLE-3 heads in the published format for a tiny model, and what the published formulas make of them, densely."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear, silu
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.serve_app.engine.tiny import SIZES, VOCAB

AUX = (1, 2, 3)


def save_base(path: Path) -> Path:
    """Save a Llama of three layers whose upper two change little: a head made of its first layer often agrees."""
    torch.manual_seed(11)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_hidden_layers": 3}))
    with torch.no_grad():
        model.model.embed_tokens.weight *= 0.02
        for layer in model.model.layers[1:]:
            layer.self_attn.o_proj.weight *= 0.05
            layer.mlp.down_proj.weight *= 0.05
    model.save_pretrained(path)
    return path


def save_head(
    base: Path,
    path: Path,
    *,
    fused: float = 1.0,
    layer: str = "midlayer",
    draft_vocab: int = VOCAB,
    tensors: dict[str, torch.Tensor | None] | None = None,
    **config: Any,
) -> Path:
    """Save a head made of the base's first layer.

    ``fused``: the size of hidden states, which are noise to it. ``tensors`` replaces tensors, or leaves them out
    (None); ``config`` does so with the config.
    """
    generator = torch.Generator().manual_seed(5)
    source = load_file(base / "model.safetensors")
    values = json.loads((base / "config.json").read_text())
    hidden = values["hidden_size"]

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    first = "model.layers.0."
    made: dict[str, torch.Tensor] = {
        "fc.weight": fused * noise(hidden, 3 * hidden),
        "norm.weight": source["model.norm.weight"],
        f"{layer}.hidden_norm.weight": torch.full((hidden,), 0.05),
    }
    for name in ("input_layernorm", "post_attention_layernorm", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj"):
        made[f"{layer}.{name}.weight"] = source[f"{first}{name}.weight"]
    made[f"{layer}.mlp.down_proj.weight"] = source[f"{first}mlp.down_proj.weight"]
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = source[f"{first}self_attn.{name}.weight"]
        made[f"{layer}.self_attn.{name}.weight"] = torch.cat([weight, 0.3 * noise(*weight.shape)], dim=1)
    ids = torch.randperm(VOCAB, generator=generator)[:draft_vocab].sort().values
    made["lm_head.weight"] = source["lm_head.weight"][ids]
    made["d2t"] = ids - torch.arange(draft_vocab)
    made["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True)
    for name, tensor in (tensors or {}).items():
        made.pop(name, None)
        if tensor is not None:
            made[name] = tensor
    kept = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    described = {
        **{name: values[name] for name in (*kept, "rms_norm_eps", "rope_parameters", "hidden_act")},
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "max_position_embeddings": 64,
        "draft_vocab_size": draft_vocab,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": list(AUX),
        **config,
    }
    path.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in made.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({k: v for k, v in described.items() if v is not None}))
    return path


class DenseHead:
    """The published formulas over a whole sequence at once: no cache, no batch, no shared code."""

    def __init__(self, base: Path, head: Path) -> None:
        self._base = AutoModelForCausalLM.from_pretrained(base)
        self._values = json.loads((head / "config.json").read_text())
        self._tensors = {
            name.replace("layers.0.", "midlayer."): t for name, t in load_file(head / "model.safetensors").items()
        }
        self._embedding = self._base.get_input_embeddings().weight

    @torch.inference_mode()
    def guess(self, ids: np.ndarray, count: int) -> list[int]:
        """Return the greedy guesses for what follows the token after which the last of ``ids`` came."""
        known = torch.tensor(ids, dtype=torch.long)
        layers = self._base.model.layers
        last: list[torch.Tensor] = []
        # The list's own last entry is normed.
        hook = layers[-1].register_forward_hook(lambda *called: last.append(called[-1]))
        found = [*self._base(known[None], output_hidden_states=True).hidden_states[:-1], *last]
        hook.remove()
        aux = torch.cat([found[layer][0] for layer in AUX], dim=-1)
        states = linear(aux, self._tensors["fc.weight"])[:-1]
        tokens, guesses = known[1:], []
        for _ in range(count):
            after = self._layer(tokens, states)
            logits = linear(self._norm(after[-1], "norm"), self._tensors["lm_head.weight"])
            best = int(logits.argmax())
            guesses.append(best + int(self._tensors["d2t"][best]))
            tokens = torch.cat([tokens, torch.tensor(guesses[-1:])])
            states = torch.cat([states, after[-1:]])
        return guesses

    def _layer(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        heads, groups = self._values["num_attention_heads"], self._values["num_key_value_heads"]
        count, width = len(tokens), self._values["head_dim"]
        normed = self._norm(states, "midlayer.hidden_norm")
        both = torch.cat([self._norm(self._embedding[tokens], "midlayer.input_layernorm"), normed], dim=-1)
        q = self._turn(self._at("self_attn.q_proj", both).view(count, heads, width))
        k = self._turn(self._at("self_attn.k_proj", both).view(count, groups, width))
        v = self._at("self_attn.v_proj", both).view(count, groups, width)
        k, v = (each.repeat_interleave(heads // groups, dim=1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / width**0.5
        scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), float("-inf"))
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(count, -1)
        residual = normed if self._values.get("norm_before_residual") else states
        middle = residual + self._at("self_attn.o_proj", mixed)
        inner = self._norm(middle, "midlayer.post_attention_layernorm")
        gated = silu(self._at("mlp.gate_proj", inner)) * self._at("mlp.up_proj", inner)
        return middle + self._at("mlp.down_proj", gated)

    def _at(self, name: str, value: torch.Tensor) -> torch.Tensor:
        return linear(value, self._tensors[f"midlayer.{name}.weight"])

    def _norm(self, value: torch.Tensor, name: str) -> torch.Tensor:
        scale = (value.square().mean(-1, keepdim=True) + self._values["rms_norm_eps"]).rsqrt()
        return value * scale * self._tensors[f"{name}.weight"]

    def _turn(self, vectors: torch.Tensor) -> torch.Tensor:
        width = vectors.shape[-1]
        theta = self._values["rope_parameters"]["rope_theta"]
        angles = torch.arange(len(vectors))[:, None] * theta ** (-torch.arange(0, width, 2) / width)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        low, high = vectors[..., : width // 2], vectors[..., width // 2 :]
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
