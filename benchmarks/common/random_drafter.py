"""EAGLE heads with random weights for any checkpoint with tied embeddings, as vLLM takes them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import safe_open
from safetensors.numpy import save_file

HEAD_DIM = 64


def make_eagle_head(
    model: Path, directory: Path, *, heads: int = 2, kv_heads: int = 1, draft_vocab_size: int | None = None
) -> Path:
    """Write a head of one Llama layer to ``directory``, and return that.

    It drafts the last token again, a little disturbed by the layer, so that some drafts are accepted if answers repeat.
    With ``draft_vocab_size`` it is one of EAGLE-3: it reads the states of three layers beside the token, and drafts
    only so many tokens, the vocabulary's first ones, from a matrix of its own.
    """
    fields = json.loads((model / "config.json").read_text())
    text = fields.get("text_config") or fields
    hidden, inner = int(text["hidden_size"]), 2 * int(text["hidden_size"])
    generator = np.random.default_rng(0)

    def normal(rows: int, columns: int, part: float = 0.3) -> npt.NDArray[np.float32]:
        return generator.standard_normal((rows, columns), dtype=np.float32) * np.float32(part * hidden**-0.5)

    third = bool(draft_vocab_size)
    layer, read = ("midlayer.", 2 * hidden) if third else ("layers.0.", hidden)
    rest = normal(hidden, (2 if third else 1) * hidden, 0.006)
    tensors = {
        "fc.weight": np.concatenate([np.eye(hidden, dtype=np.float32), rest], axis=1),
        layer + "self_attn.q_proj.weight": normal(heads * HEAD_DIM, read),
        layer + "self_attn.k_proj.weight": normal(kv_heads * HEAD_DIM, read),
        layer + "self_attn.v_proj.weight": normal(kv_heads * HEAD_DIM, read),
        layer + "self_attn.o_proj.weight": normal(hidden, heads * HEAD_DIM),
        layer + "post_attention_layernorm.weight": np.ones(hidden, dtype=np.float32),
        layer + "mlp.gate_proj.weight": normal(inner, hidden),
        layer + "mlp.up_proj.weight": normal(inner, hidden),
        layer + "mlp.down_proj.weight": normal(hidden, inner, 0.006),
    }
    if third:
        tensors |= {name: np.ones(hidden, dtype=np.float32) for name in (
            layer + "hidden_norm.weight", layer + "input_layernorm.weight", "norm.weight")}  # fmt: skip
        with safe_open(next(model.glob("*.safetensors")), "pt") as file:
            rows = file.get_slice("model.embed_tokens.weight")[:draft_vocab_size]
        tensors["lm_head.weight"] = rows.float().numpy()
        tensors["d2t"] = np.zeros(len(rows), dtype=np.int64)
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLMEagle3" if third else "LlamaForCausalLM"], "model_type": "llama",
        "dtype": "float32", "hidden_act": "silu",
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 1, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": HEAD_DIM, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "max_position_embeddings": text["max_position_embeddings"], "vocab_size": text["vocab_size"],
    }  # fmt: skip
    if third:
        layers = int(text["num_hidden_layers"])
        read_from = sorted({0, layers // 2, layers - 1})  # the first are the tokens themselves
        config |= {
            "draft_vocab_size": draft_vocab_size,
            "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": read_from},
        }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def with_eagle_head(drafting: dict[str, Any] | None, model: Path, directory: Path) -> dict[str, Any] | None:
    """Return vLLM's ``speculative_config`` with a random head in ``directory`` where EAGLE lacks its model."""
    if not drafting or drafting.get("method") not in ("eagle", "eagle3") or "model" in drafting:
        return drafting
    text = json.loads((model / "config.json").read_text())
    vocab_size = int((text.get("text_config") or text)["vocab_size"])
    drafts = vocab_size // 2 if drafting["method"] == "eagle3" else None
    return {**drafting, "model": str(make_eagle_head(model, directory, draft_vocab_size=drafts))}
