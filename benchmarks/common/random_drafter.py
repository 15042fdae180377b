"""An EAGLE head with random weights for any checkpoint with tied embeddings, as vLLM's `eagle` method takes it."""

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

HEAD_DIM = 64


def make_eagle_head(model: Path, directory: Path, *, heads: int = 2, kv_heads: int = 1) -> Path:
    """Write a head of one Llama layer to ``directory``, and return that.

    It drafts the last token again, a little disturbed by the layer, so that some drafts are accepted if answers repeat.
    """
    fields = json.loads((model / "config.json").read_text())
    text = fields.get("text_config") or fields
    hidden, inner = int(text["hidden_size"]), 2 * int(text["hidden_size"])
    generator = np.random.default_rng(0)

    def normal(rows: int, columns: int, part: float = 0.3) -> npt.NDArray[np.float32]:
        return generator.standard_normal((rows, columns), dtype=np.float32) * np.float32(part * hidden**-0.5)

    layer = "layers.0."
    tensors = {
        "fc.weight": np.concatenate([np.eye(hidden, dtype=np.float32), normal(hidden, hidden, 0.006)], axis=1),
        layer + "self_attn.q_proj.weight": normal(heads * HEAD_DIM, hidden),
        layer + "self_attn.k_proj.weight": normal(kv_heads * HEAD_DIM, hidden),
        layer + "self_attn.v_proj.weight": normal(kv_heads * HEAD_DIM, hidden),
        layer + "self_attn.o_proj.weight": normal(hidden, heads * HEAD_DIM),
        layer + "post_attention_layernorm.weight": np.ones(hidden, dtype=np.float32),
        layer + "mlp.gate_proj.weight": normal(inner, hidden),
        layer + "mlp.up_proj.weight": normal(inner, hidden),
        layer + "mlp.down_proj.weight": normal(hidden, inner, 0.006),
    }
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", "hidden_act": "silu",
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 1, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": HEAD_DIM, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "max_position_embeddings": text["max_position_embeddings"], "vocab_size": text["vocab_size"],
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    return directory
