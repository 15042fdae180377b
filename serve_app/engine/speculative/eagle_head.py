"""An EAGLE-3 head: one decoder layer that guesses the next tokens from hidden states of a base model.

A head reads pairs: a token's embedding beside the state of the position before it, fused from three layers of the
base. Its keys and values depend on the pair alone, so they are computed without attention. Source: the EAGLE-3 paper
(arXiv 2503.01840) and the files of published heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from serve_app.engine.speculative.eagle_config import AUX_LAYERS, EagleConfig

_FROM_BASE = {"embed_tokens.weight", "lm_head.weight"}
"""Taken from the base model where a file leaves them out."""

_ELSEWHERE = {"d2t", "t2d", "midlayer.self_attn.rotary_emb.inv_freq"}
"""Tensors of published files that are no weights of the module."""

_LLAMA = (
    "attention_bias", "hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings", "mlp_bias",
    "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta",
)  # fmt: skip
"""What transformers' Llama parts read of a head's config."""

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of positions, [n, head_dim] each."""


class _Attention(nn.Module):
    """The four projections; queries, keys and values read embedding and state side by side."""

    def __init__(self, config: EagleConfig, bias: bool) -> None:
        super().__init__()
        wide, width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, wide, bias=bias)
        self.k_proj = nn.Linear(2 * config.hidden_size, width, bias=bias)
        self.v_proj = nn.Linear(2 * config.hidden_size, width, bias=bias)
        self.o_proj = nn.Linear(wide, config.hidden_size, bias=bias)


class _Layer(nn.Module):
    def __init__(self, config: EagleConfig, llama: LlamaConfig) -> None:
        super().__init__()
        eps = llama.rms_norm_eps
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps)
        self.self_attn = _Attention(config, bool(llama.attention_bias))
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps)
        self.mlp = LlamaMLP(llama)


class EagleHead(nn.Module):
    """The module. ``draft_ids`` [draft vocab]: which token of the base's vocabulary each logit stands for."""

    draft_ids: torch.Tensor

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        known = {name: config.values[name] for name in _LLAMA if name in config.values}
        llama = LlamaConfig.from_dict({**known, "num_hidden_layers": 1, "head_dim": config.head_dim})
        hidden = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.fc = nn.Linear(AUX_LAYERS * config.base_hidden_size, hidden, bias=False)
        self.midlayer = _Layer(config, llama)
        self.norm = LlamaRMSNorm(hidden, llama.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(llama)
        self.register_buffer("draft_ids", torch.arange(config.draft_vocab_size), persistent=False)

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """Return the head's own states [n, hidden] of base states [n, 3 * base hidden], low layer first."""
        fused: torch.Tensor = self.fc(states)
        return fused

    def rotation(self, positions: torch.Tensor) -> Rotation:
        """Return the rotation of pairs; a pair's position is that of its state, one before its token's."""
        cos, sin = self.rotary(self.fc.weight, positions[None])
        return cos[0], sin[0]

    def read(self, token_ids: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what attention reads of pairs, [n, 2 * hidden], and what is added to its output, [n, hidden]."""
        layer = self.midlayer
        normed = layer.hidden_norm(states)
        embedded = layer.input_layernorm(self.embed_tokens(token_ids).to(states.dtype))
        return torch.cat((embedded, normed), dim=-1), normed if self.config.norm_before_residual else states

    def keys_values(self, pairs: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of pairs, [n, kv_heads, head_dim] each."""
        attention, shape = self.midlayer.self_attn, (len(pairs), self.config.num_kv_heads, self.config.head_dim)
        return _rotated(attention.k_proj(pairs).view(shape), rotation), attention.v_proj(pairs).view(shape)

    def queries(self, pairs: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Return the queries of pairs, [n, heads, head_dim]."""
        shape = (len(pairs), self.config.num_heads, self.config.head_dim)
        return _rotated(self.midlayer.self_attn.q_proj(pairs).view(shape), rotation)

    def finish(self, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return the states [n, hidden] after the layer; each is the state that its guess is paired with.

        ``attended``: [n, heads, head_dim].
        """
        layer = self.midlayer
        after = residual + layer.self_attn.o_proj(attended.flatten(1))
        states: torch.Tensor = after + layer.mlp(layer.post_attention_layernorm(after))
        return states

    def draft_logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits over the head's own vocabulary, [n, draft vocab]; ``draft_ids`` says of which tokens."""
        logits: torch.Tensor = self.lm_head(self.norm(states))
        return logits


def load_head(config: EagleConfig, base: Any, dtype: torch.dtype, device: torch.device) -> EagleHead:
    """Load the head of ``config`` for the transformers model ``base``, whose embeddings it may share.

    Raises ValueError, naming tensor and shapes, where the files are not what the config says, OSError where there
    are none.
    """
    files = sorted(config.path.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{config.path} holds no *.safetensors weights; convert the head to safetensors")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors |= {_plain_name(name): tensor for name, tensor in load_file(file).items()}
    with torch.device("meta"):
        head = EagleHead(config)
    wanted = head.state_dict()
    _check(config.path, wanted, tensors)
    kept = {name: tensor for name, tensor in tensors.items() if name in wanted}
    head.load_state_dict({name: tensor.to(dtype) for name, tensor in kept.items()}, strict=False, assign=True)
    head.rotary = LlamaRotaryEmbedding(head.rotary.config)
    head.draft_ids = _draft_ids(config, tensors.get("d2t"))
    _share(head, base, _FROM_BASE - tensors.keys())
    return head.to(device).eval()


def _rotated(vectors: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate [n, heads, head_dim] by each row's position."""
    turned: torch.Tensor = apply_rotary_pos_emb(vectors, vectors[:, :0], *rotation)[0]
    return turned


def _plain_name(name: str) -> str:
    """Return a tensor's name as the module has it: files say ``midlayer`` or ``layers.0``, some after ``model.``."""
    name = name.removeprefix("model.")
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def _check(path: Path, wanted: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError unless ``tensors`` are those of ``wanted``, but for what the base can lend."""
    unknown = sorted(tensors.keys() - wanted.keys() - _ELSEWHERE)
    if unknown:
        raise ValueError(
            f"the EAGLE-3 head {path} has tensors that this engine has no use for ({', '.join(unknown[:4])}): only "
            "heads of one decoder layer are run"
        )
    missing = sorted(wanted.keys() - tensors.keys() - _FROM_BASE)
    if missing:
        raise ValueError(f"the EAGLE-3 head {path} lacks {', '.join(missing[:4])}: copy the checkpoint again")
    for name, tensor in tensors.items():
        if name in wanted and tensor.shape != wanted[name].shape:
            raise ValueError(
                f"{name} of the EAGLE-3 head {path} has the shape {list(tensor.shape)}, and its config.json says "
                f"{list(wanted[name].shape)}: the two files do not belong together"
            )


def _draft_ids(config: EagleConfig, offsets: torch.Tensor | None) -> torch.Tensor:
    """Return the base's token of each draft token: draft token i stands for i + ``offsets[i]``."""
    count = config.draft_vocab_size
    if offsets is None:
        if count != config.vocab_size:
            raise ValueError(
                f"the EAGLE-3 head {config.path} has {count} draft tokens for {config.vocab_size} and no d2t that "
                "says which: copy the checkpoint again"
            )
        return torch.arange(count)
    if offsets.shape != (count,):
        raise ValueError(f"d2t of the EAGLE-3 head {config.path} has {len(offsets)} entries for {count} draft tokens")
    ids = torch.arange(count) + offsets.long()
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size or len(set(ids.tolist())) != count:
        raise ValueError(f"d2t of the EAGLE-3 head {config.path} does not name {count} of {config.vocab_size} tokens")
    return ids


def _share(head: EagleHead, base: Any, names: set[str]) -> None:
    """Let the base lend what the files leave out."""
    lenders = {"embed_tokens.weight": base.get_input_embeddings(), "lm_head.weight": base.get_output_embeddings()}
    for name in sorted(names):
        weight, wanted = lenders[name].weight, head.get_parameter(name).shape
        if weight.shape != wanted:
            raise ValueError(
                f"the EAGLE-3 head {head.config.path} has no {name} and needs one of {list(wanted)}, but the base "
                f"model's is {list(weight.shape)}: copy the checkpoint again"
            )
        head.get_submodule(name.removesuffix(".weight")).weight = weight
