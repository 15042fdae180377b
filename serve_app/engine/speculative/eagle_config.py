"""An EAGLE-3 head's config.json, checked against a base model. Imports no torch, for an ingress reads it too."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve_app.engine.runner.kv_size import dtype_bytes

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
AUX_LAYERS = 3

_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """A head's config. ``layer_ids``: whose inputs it reads, by base layer; None: the published default.

    ``values`` is the whole file, for what transformers' Llama parts read of it (rope, activation, norms).
    """

    path: Path
    values: Mapping[str, Any]
    hidden_size: int
    base_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    norm_before_residual: bool
    layer_ids: tuple[int, ...] | None

    def block_bytes(self, dtype: str, block_size: int) -> int:
        """Return the bytes of one block: keys and values of one layer, and the state at the block's end."""
        return dtype_bytes(dtype) * (2 * block_size * self.num_kv_heads * self.head_dim + self.hidden_size)

    def aux_layers(self, base_layers: int) -> tuple[int, ...]:
        """Return the base layers whose inputs are read; ``base_layers`` itself means the last layer's output.

        Source of the default: 2, n // 2 and n - 3, as heads are trained by their authors. Raises ValueError where
        a base of that depth has no such layers.
        """
        layers = self.layer_ids or (2, base_layers // 2, base_layers - 3)
        if any(not 0 <= layer <= base_layers for layer in layers):
            origin = "names" if self.layer_ids else "leaves out eagle_aux_hidden_state_layer_ids, which means"
            raise ValueError(
                f"{self.path / 'config.json'} {origin} layers {', '.join(map(str, layers))}, but the base model has "
                f"{base_layers} layers: name {AUX_LAYERS} layers from 0 to {base_layers}"
            )
        return layers

    def check_fits(self, base_path: Path, base: Mapping[str, Any]) -> None:
        """Raise ValueError, naming both sides, unless the head was made for a base with the config ``base``."""
        nested = base.get("text_config")
        text = nested if isinstance(nested, Mapping) else base
        for what, ours, theirs in (
            ("hidden_size", self.base_hidden_size, text.get("hidden_size")),
            ("vocab_size", self.vocab_size, text.get("vocab_size")),
        ):
            if theirs is not None and ours != theirs:
                raise ValueError(
                    f"the EAGLE-3 head {self.path} was made for a base model of {what} {ours}, and {base_path} has "
                    f"{theirs}: choose the head that was trained for this model"
                )
        layers = text.get("num_hidden_layers")
        if isinstance(layers, int):
            self.aux_layers(layers)


def read_eagle_config(path: Path) -> EagleConfig | None:
    """Return the config of the EAGLE-3 head in ``path``; None: no such head. Raises ValueError for an unusable one."""
    file = path / "config.json"
    try:
        values = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(values, dict) or not set(ARCHITECTURES) & set(values.get("architectures") or ()):
        return None
    missing = [name for name in _SIZES if type(values.get(name)) is not int or values[name] < 1]
    if missing:
        raise ValueError(f"{file} must name {', '.join(missing)} as positive integers")
    if values.get("norm_before_fc"):
        raise ValueError(f"{file} asks for norm_before_fc, which is not supported: use a head without it")
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    return EagleConfig(
        path=path,
        values=values,
        hidden_size=hidden,
        base_hidden_size=int(values.get("target_hidden_size") or hidden),
        num_heads=heads,
        num_kv_heads=int(values.get("num_key_value_heads") or heads),
        head_dim=int(values.get("head_dim") or hidden // heads),
        vocab_size=values["vocab_size"],
        draft_vocab_size=int(values.get("draft_vocab_size") or values["vocab_size"]),
        norm_before_residual=bool(values.get("norm_before_residual")),
        layer_ids=_layer_ids(file, values),
    )


def _layer_ids(file: Path, values: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the base layers whose inputs are read.

    Source: vLLM, where the top-level ids are those of the layers before which a state is taken; SGLang, where those
    inside ``eagle_config`` are of the layers after which it is taken.
    """
    nested = values.get("eagle_config") or {}
    if nested.get("use_aux_hidden_state") is False:
        raise ValueError(f"{file} describes a head that reads no auxiliary hidden states: only EAGLE-3 heads are run")
    name = "eagle_aux_hidden_state_layer_ids"
    layers, after = values.get(name), 0
    if layers is None:
        layers, after = nested.get(name), 1
    if layers is None:
        return None
    if not isinstance(layers, list) or len(layers) != AUX_LAYERS or any(type(layer) is not int for layer in layers):
        raise ValueError(f"{file}: {name} must be a list of {AUX_LAYERS} layers, not {layers!r}")
    return tuple(layer + after for layer in layers)
