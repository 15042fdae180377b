"""An EAGLE-3 head: one decoder layer that guesses the next tokens from hidden states of a base model.

A head reads pairs: a token's embedding beside the state of the position before it, fused from three layers of the
base. Its keys and values depend on the pair alone, so they are computed without attention. Source: the EAGLE-3 paper
(arXiv 2503.01840) and the files of published heads.
"""

from collections.abc import Sequence
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
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
"""What transformers' Llama parts read of a head's config; what else stands there may be of the base model."""

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines of positions, [n, head_dim] each."""


class EagleHead(nn.Module):
    """The module. ``fc`` makes the head's own states [n, hidden] of base states [n, 3 * base hidden], low layer first.

    ``draft_ids`` [draft vocab]: which token of the base's vocabulary each logit of ``lm_head`` stands for.
    """

    draft_ids: torch.Tensor

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        known = {name: config.values[name] for name in _LLAMA if name in config.values}
        llama = LlamaConfig.from_dict({**known, "num_hidden_layers": 1, "head_dim": config.head_dim})
        hidden = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.fc = nn.Linear(AUX_LAYERS * config.base_hidden_size, hidden, bias=False)
        self.midlayer: Any = LlamaDecoderLayer(llama, layer_idx=0)
        self.midlayer.hidden_norm = LlamaRMSNorm(hidden, llama.rms_norm_eps)
        # Queries, keys and values read embedding and state side by side.
        attention = self.midlayer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            plain = getattr(attention, name)
            setattr(attention, name, nn.Linear(2 * hidden, plain.out_features, bias=plain.bias is not None))
        self.norm = LlamaRMSNorm(hidden, llama.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(llama)
        self.register_buffer("draft_ids", torch.arange(config.draft_vocab_size), persistent=False)

    def rotation(self, positions: torch.Tensor) -> Rotation:
        """Return the rotation of pairs; a pair's position is that of its state, one before its token's."""
        cos, sin = self.rotary(self.fc.weight, positions[None])
        return cos[0], sin[0]

    def read(self, token_ids: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what attention reads of pairs, [n, 2 * hidden], and what is added to its output, [n, hidden]."""
        normed = self.midlayer.hidden_norm(states)
        embedded = self.midlayer.input_layernorm(self.embed_tokens(token_ids).to(states.dtype))
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
        """Return the states [n, hidden] after the layer, one for each guess; ``attended``: [n, heads, head_dim]."""
        layer = self.midlayer
        after = residual + layer.self_attn.o_proj(attended.flatten(1))
        states: torch.Tensor = after + layer.mlp(layer.post_attention_layernorm(after))
        return states


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
    weights = {name: tensor.to(dtype) for name, tensor in tensors.items() if name not in _ELSEWHERE}
    try:
        missing, unexpected = head.load_state_dict(weights, strict=False, assign=True)
    except RuntimeError as error:
        differences = "; ".join(line.strip() for line in str(error).splitlines()[1:])
        raise ValueError(f"weights and config.json of the EAGLE-3 head {config.path} differ: {differences}") from None
    if unexpected:
        raise ValueError(
            f"the EAGLE-3 head {config.path} has tensors that this engine has no use for "
            f"({', '.join(unexpected[:4])}): only heads of one decoder layer are run"
        )
    lacking = sorted({*missing} - _FROM_BASE)
    if lacking:
        raise ValueError(f"the EAGLE-3 head {config.path} lacks {', '.join(lacking[:4])}: copy the checkpoint again")
    head.rotary = LlamaRotaryEmbedding(head.rotary.config)
    head.draft_ids = _draft_ids(config, tensors.get("d2t"))
    _share(head, base, missing)
    return head.to(device).eval()


def _rotated(vectors: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate [n, heads, head_dim] by each row's position."""
    turned: torch.Tensor = apply_rotary_pos_emb(vectors, vectors[:, :0], *rotation)[0]
    return turned


def _plain_name(name: str) -> str:
    """Return a tensor's name as the module has it: files say ``midlayer`` or ``layers.0``, some after ``model.``."""
    name = name.removeprefix("model.")
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


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


def _share(head: EagleHead, base: Any, names: Sequence[str]) -> None:
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
