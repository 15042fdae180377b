"""A GGUF file of a few hundred kilobytes, as by llama.cpp's converter: a Llama in Q4_1, a BPE tokenizer."""

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import dequantize, quantize

from serve_app.checkpoints.demo_model import IM_END

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, POSITIONS = 64, 128, 2, 4, 2, 2048
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}: {{ message['content'] }}<|im_end|>{% endfor %}"
)

Array = npt.NDArray[np.float32]


def write_tiny_gguf(path: Path, demo_model_path: Path) -> dict[str, Array]:
    """Write the file, with the demo model's vocabulary; return its weights by transformers' names, dequantised."""
    tokenizer = json.loads((demo_model_path / "tokenizer.json").read_text())
    special = {token["content"] for token in tokenizer["added_tokens"]}
    vocabulary = tokenizer["model"]["vocab"] | {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    writer = GGUFWriter(path, "llama")
    sizes = {"context_length": POSITIONS, "block_count": LAYERS, "embedding_length": HIDDEN}
    sizes |= {"feed_forward_length": INNER, "head_count": HEADS, "head_count_kv": KV_HEADS, "vocab_size": len(tokens)}
    for name, size in {**sizes, "rope_dimension_count": HIDDEN // HEADS}.items():
        getattr(writer, f"add_{name}")(size)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(vocabulary[IM_END])
    writer.add_chat_template(TEMPLATE)
    kept = _add_weights(writer, len(tokens))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


def _add_weights(writer: GGUFWriter, vocab_size: int) -> dict[str, Array]:
    rng = np.random.default_rng(7)
    kept: dict[str, Array] = {}

    def matrix(gguf: str, name: str, rows: int, columns: int, heads: int = 0) -> None:
        packed = quantize(rng.standard_normal((rows, columns), dtype=np.float32) * 0.1, GGMLQuantizationType.Q4_1)
        writer.add_tensor(gguf, packed, raw_dtype=GGMLQuantizationType.Q4_1)
        plain = dequantize(packed, GGMLQuantizationType.Q4_1)
        # llama.cpp rotates pairs of neighbours, transformers halves of a head, so the rows of q and k are reordered.
        if heads:
            plain = plain.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
        kept[name] = plain

    def norm(gguf: str, name: str) -> None:
        kept[name] = 1 + rng.standard_normal(HIDDEN, dtype=np.float32) * np.float32(0.1)
        writer.add_tensor(gguf, kept[name])

    head = HIDDEN // HEADS
    matrix("token_embd.weight", "model.embed_tokens.weight", vocab_size, HIDDEN)
    norm("output_norm.weight", "model.norm.weight")
    for layer in range(LAYERS):
        ours, theirs = f"model.layers.{layer}.", f"blk.{layer}."
        norm(theirs + "attn_norm.weight", ours + "input_layernorm.weight")
        norm(theirs + "ffn_norm.weight", ours + "post_attention_layernorm.weight")
        matrix(theirs + "attn_q.weight", ours + "self_attn.q_proj.weight", HEADS * head, HIDDEN, HEADS)
        matrix(theirs + "attn_k.weight", ours + "self_attn.k_proj.weight", KV_HEADS * head, HIDDEN, KV_HEADS)
        matrix(theirs + "attn_v.weight", ours + "self_attn.v_proj.weight", KV_HEADS * head, HIDDEN)
        matrix(theirs + "attn_output.weight", ours + "self_attn.o_proj.weight", HIDDEN, HEADS * head)
        matrix(theirs + "ffn_gate.weight", ours + "mlp.gate_proj.weight", INNER, HIDDEN)
        matrix(theirs + "ffn_up.weight", ours + "mlp.up_proj.weight", INNER, HIDDEN)
        matrix(theirs + "ffn_down.weight", ours + "mlp.down_proj.weight", HIDDEN, INNER)
    return kept
