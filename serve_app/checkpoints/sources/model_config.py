"""The fields of a model's config by transformers' names, without fetching weights or converting a GGUF file."""

import json
from pathlib import Path
from typing import Any

from serve_app.checkpoints.checkpoint import CheckpointError
from serve_app.checkpoints.sources.hub import ensure_config
from serve_app.checkpoints.sources.resolve import resolve_model
from serve_app.config.app import is_hub_id

_GGUF_FIELDS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "vocab_size": "vocab_size",
    "num_experts": "expert_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
"""transformers' names -> llama.cpp's names without the architecture."""


def model_config(model: str) -> dict[str, Any]:
    """Return a language model's config fields. Raises CheckpointError, OSError, or ValueError for invalid JSON."""
    path = Path(model).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return _gguf_config(path)
    if path.suffix == ".json":
        file = path
    elif is_hub_id(model):
        file = ensure_config(model, None)
    else:
        file = resolve_model(model) / "config.json"
    fields = json.loads(file.read_text())
    if not isinstance(fields, dict):
        raise CheckpointError(f"{file} holds no object")
    return dict(fields.get("text_config") or fields)


def _gguf_config(path: Path) -> dict[str, Any]:
    from gguf import GGUFReader  # a large import that only GGUF files need

    reader = GGUFReader(path)

    def value(key: str) -> Any:
        field = reader.get_field(key)
        return None if field is None else field.contents()

    architecture = value("general.architecture")
    fields = {name: value(f"{architecture}.{key}") for name, key in _GGUF_FIELDS.items()}
    fields["vocab_size"] = fields["vocab_size"] or len(value("tokenizer.ggml.tokens") or ()) or None
    fields["tie_word_embeddings"] = all(tensor.name != "output.weight" for tensor in reader.tensors)
    return {name: field for name, field in fields.items() if field is not None}
