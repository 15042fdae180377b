"""Models by their shape: a config, a tokenizer made here, and random weights, so that nothing is fetched."""

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from benchmarks.end_to_end.replay.text import whole_words
from serve_app.checkpoints.demo_model import ensure_demo_model

_FILES = ("tokenizer_config.json", "generation_config.json", "chat_template.jinja")
_REPEAT = 1 << 24
"""Random values of the written weights; they repeat after these."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama's sizes, and those of the measurements.

    ``prompts``: tokens of the prompts of a time to first token; ``streams``: concurrent answers of ``answer_tokens``;
    ``agents_per_id``, ``chats_per_id``: tokens that replace the two traces' 512; ``chats``: requests of the second one;
    ``seconds``: of the flood's two parts; ``predictions``: requests.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    dtype: str
    max_model_len: int
    batched_tokens: int
    prompts: tuple[int, ...]
    streams: tuple[int, ...]
    answer_tokens: int
    agents_per_id: int
    chats_per_id: int
    chats: int
    seconds: float
    predictions: int
    runs: int

    @property
    def value_bytes(self) -> int:
        """The bytes of one weight."""
        return 4 if self.dtype == "float32" else 2

    @property
    def weights_bytes(self) -> int:
        """The bytes of all weights."""
        heads = 2 * self.num_attention_heads + 2 * self.num_key_value_heads
        layer = self.hidden_size * (self.head_dim * heads + 3 * self.intermediate_size)
        return self.value_bytes * (self.num_hidden_layers * layer + 2 * self.vocab_size * self.hidden_size)

    @property
    def kv_token_bytes(self) -> int:
        """The bytes of one token's KV."""
        return 2 * self.value_bytes * self.num_hidden_layers * self.num_key_value_heads * self.head_dim

    def config(self) -> dict[str, Any]:
        """Return the model's config.json."""
        names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
        sizes = {name: getattr(self, name) for name in (*names, "num_key_value_heads", "vocab_size", "dtype")}
        rope = {"rope_type": "default", "rope_theta": 500000.0}
        return sizes | {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072, "rope_parameters": rope, "rope_theta": 500000.0, "bos_token_id": None,
            "eos_token_id": 2, "tie_word_embeddings": False,
        }  # fmt: skip


SHAPES = {
    "llama-8b": Shape(
        4096, 14336, 32, 32, 8, 128, 128256, "bfloat16", max_model_len=40960, batched_tokens=8192,
        prompts=(8192, 32768), streams=(1, 16, 64, 256), answer_tokens=128,
        agents_per_id=64, chats_per_id=16, chats=1000, seconds=8.0, predictions=500, runs=5,
    ),
    "tiny": Shape(
        256, 768, 4, 4, 2, 64, 4096, "float32", max_model_len=4096, batched_tokens=1024,
        prompts=(512, 2048), streams=(1, 4, 16), answer_tokens=16,
        agents_per_id=8, chats_per_id=8, chats=100, seconds=5.0, predictions=60, runs=2,
    ),
}  # fmt: skip
"""``llama-8b`` has the sizes of Llama-3.1-8B. ``tiny`` rehearses all rows on a CPU; its figures say nothing."""


def make_checkpoint(shape: Shape, directory: Path) -> Path:
    """Write config and tokenizer, for engines that make weights themselves; return the directory.

    The demo model's tokenizer gets made-up words up to the vocabulary's size: prompts never have them, but every token
    of a random model is a text.
    """
    demo = ensure_demo_model("demo")
    directory.mkdir(parents=True)
    for name in _FILES:
        (directory / name).write_bytes((demo / name).read_bytes())
    tokenizer = json.loads((demo / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {f"Ġw{number}": number for number in range(len(vocabulary), shape.vocab_size)}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "config.json").write_text(json.dumps(shape.config()))
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
    files: dict[str, list[str]] = {}
    for name in shapes:
        layer = name.split(".")[2] if ".layers." in name else "rest"
        files.setdefault(f"model-{layer}.safetensors", []).append(name)
    for file_name, names in files.items():
        tensors = {
            name: torch.ones(shapes[name], dtype=config.dtype)
            if len(shapes[name]) == 1
            else values.repeat(-(-shapes[name].numel() // _REPEAT))[: shapes[name].numel()].reshape(shapes[name])
            for name in names
        }
        save_torch(tensors, directory / file_name, metadata={"format": "pt"})
    places = {name: file_name for file_name, names in files.items() for name in names}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return directory


def text_of(tokens: int, checkpoint: Path, seed: object) -> str:
    """Return a text of exactly ``tokens`` tokens: words of one token each, drawn by the seed."""
    return "".join(Random(str(seed)).choices(whole_words(checkpoint), k=tokens))
