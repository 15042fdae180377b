"""Models by their shape: a config, a tokenizer made here, and random weights, so that nothing is fetched."""

import json
from math import prod
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

from benchmarks.common.trace_text import whole_words
from serve_app.checkpoints.demo_model import ensure_demo_model

_REPEAT = 1 << 24
"""Random values of the written weights; they repeat after these."""


class Shape(NamedTuple):
    """A model's config, and the sizes of the measurements.

    ``batched_tokens``: of a step. ``prompts``: tokens of the prompts of a time to first token. ``streams``: concurrent
    answers of ``answer_tokens``.
    ``agents_per_id``, ``chats_per_id``: tokens that replace the two traces' 512; ``chats``: requests of the second one;
    ``polite``: requests beside a flood; ``predictions``: requests; ``runs``: of each measurement of one replica.
    """

    config: dict[str, Any]
    max_model_len: int
    batched_tokens: int
    prompts: tuple[int, ...]
    streams: tuple[int, ...]
    answer_tokens: int
    agents_per_id: int
    chats_per_id: int
    chats: int
    polite: int
    predictions: int
    runs: int

    @property
    def dtype(self) -> str:
        """The format of weights and KV."""
        return str(self.config["dtype"])

    @property
    def kv_token_bytes(self) -> int:
        """The bytes of one token's KV."""
        sizes = [int(self.config[name]) for name in ("num_hidden_layers", "num_key_value_heads", "head_dim")]
        return prod(sizes) * 2 * (4 if self.dtype == "float32" else 2)


def _llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head, "max_position_embeddings": 131072, "rope_theta": 500000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "bos_token_id": None, "eos_token_id": 2,
        "tie_word_embeddings": False, **more,
    }  # fmt: skip


def _gemma3(hidden: int, inner: int, heads: int, kv_heads: int, head: int, window: int, **more: Any) -> dict[str, Any]:
    layers = ["sliding_attention"] * 5 + ["full_attention"]
    kinds = (layers * 6)[: more.pop("num_hidden_layers")]
    return {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": len(kinds), "layer_types": kinds,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head, "query_pre_attn_scalar": head,
        "sliding_window": window, "max_position_embeddings": 131072, "bos_token_id": None, "eos_token_id": 2,
        "tie_word_embeddings": True, **more,
    }  # fmt: skip


SHAPES = {
    "llama-8b": Shape(
        _llama(4096, 14336, 32, 32, 8, 128, vocab_size=128256, dtype="bfloat16"), max_model_len=40960,
        batched_tokens=8192, prompts=(8192, 32768), streams=(1, 16, 64, 256), answer_tokens=128,
        agents_per_id=64, chats_per_id=16, chats=1000, polite=40, predictions=500, runs=5,
    ),
    "tiny": Shape(
        _llama(256, 768, 4, 4, 2, 64, vocab_size=4096, dtype="float32"), max_model_len=4096,
        batched_tokens=512, prompts=(512, 2048), streams=(1, 4, 16), answer_tokens=16,
        agents_per_id=8, chats_per_id=8, chats=100, polite=20, predictions=60, runs=2,
    ),
}  # fmt: skip
SHAPES["cpu"] = SHAPES["tiny"]._replace(streams=(1, 16, 64, 256), answer_tokens=128, runs=5)
"""``llama-8b`` has the sizes of Llama-3.1-8B. ``tiny`` rehearses all rows on a CPU, and its figures say nothing;
``cpu`` is the same model, measured as long as a claim needs."""


_WINDOWED = {
    "llama-8b": _gemma3(2560, 10240, 8, 4, 256, 1024, num_hidden_layers=34, vocab_size=262144, dtype="bfloat16"),
    "tiny": _gemma3(256, 768, 4, 2, 64, 128, num_hidden_layers=6, vocab_size=4096, dtype="float32"),
}
_WINDOWED["cpu"] = _WINDOWED["tiny"]


def windowed(name: str) -> Shape:
    """Return the shape whose layers see a window, all but each sixth: Gemma-3-4B's sizes beside ``llama-8b``."""
    return SHAPES[name]._replace(config=_WINDOWED[name])


def drafter(shape: Shape) -> Shape:
    """Return the shape of an EAGLE head: one layer. vLLM gives it the model's embeddings and output layer."""
    return shape._replace(config={**shape.config, "num_hidden_layers": 1})


def make_checkpoint(shape: Shape, directory: Path) -> Path:
    """Write config and tokenizer, for engines that make weights themselves; return the directory.

    The demo model's tokenizer gets made-up words up to the vocabulary's size: prompts never have them, but every token
    of a random model is a text.
    """
    demo = ensure_demo_model("demo")
    directory.mkdir(parents=True)
    for name in ("tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        (directory / name).write_bytes((demo / name).read_bytes())
    tokenizer = json.loads((demo / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {f"Ġw{number}": number for number in range(len(vocabulary), shape.config["vocab_size"])}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "config.json").write_text(json.dumps(shape.config))
    # A checkpoint has weights. Nobody reads these.
    save_file({"unused": np.zeros(1, np.float32)}, directory / "model.safetensors")
    return directory


def write_weights(checkpoint: Path, directory: Path) -> Path:
    """Write a copy of a checkpoint with random weights, a file for each layer; return its directory."""
    import torch
    from safetensors.torch import save_file as save_torch
    from transformers import AutoConfig, AutoModelForCausalLM

    directory.mkdir(parents=True)
    for file in checkpoint.iterdir():
        if file.suffix != ".safetensors":
            (directory / file.name).write_bytes(file.read_bytes())
    config = AutoConfig.from_pretrained(str(checkpoint), local_files_only=True)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in AutoModelForCausalLM.from_config(config).state_dict().items()}
    values = (0.02 * torch.randn(_REPEAT, generator=torch.Generator().manual_seed(1))).to(config.dtype)
    places = {name: f"model-{name.split('.')[2] if '.layers.' in name else 'rest'}.safetensors" for name in shapes}
    for place in set(places.values()):
        tensors = {
            name: torch.ones(size, dtype=config.dtype)
            if len(size) == 1
            else values.repeat(-(-size.numel() // _REPEAT))[: size.numel()].reshape(size)
            for name, size in shapes.items()
            if places[name] == place
        }
        save_torch(tensors, directory / place, metadata={"format": "pt"})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return directory


def text_of(tokens: int, checkpoint: Path, seed: object) -> str:
    """Return a text of exactly ``tokens`` tokens: words of one token each, drawn by the seed."""
    return "".join(Random(str(seed)).choices(whole_words(checkpoint), k=tokens))
