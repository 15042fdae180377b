"""An adapter's tensors, checked against the model: a pair of matrices per layer, with the scale multiplied in."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import safetensors
import safetensors.torch
import torch

from serve_app.engine.lora.peft_files import AdapterConfig, AdapterFile
from serve_app.engine.protocol import AdapterError

_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<part>[AB])(?:\.default)?\.weight")


@dataclass(frozen=True, slots=True)
class LoraPair:
    """One layer's adapter: y += (x @ ``down``.T) @ ``up``; ``down`` [rank, in], ``up`` [rank, out]."""

    down: torch.Tensor
    up: torch.Tensor


AdapterWeights = Mapping[str, LoraPair]
"""Pairs by the layer's name in the base model."""


def adaptable_layers(model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """Return the layers that an adapter may target, by name: linear ones except the output layer and routed experts."""
    output = getattr(model, "get_output_embeddings", lambda: None)()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not output and ".experts." not in name
    }


def adapter_weights(
    file: AdapterFile, layers: Mapping[str, torch.nn.Linear], *, max_rank: int, dtype: torch.dtype
) -> AdapterWeights:
    """Parse an adapter for a model with ``layers``. Raises AdapterError unless every tensor matches a layer."""
    file.config.check_rank(max_rank)
    try:
        tensors = safetensors.torch.load(file.weights)
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise AdapterError("the adapter's weights are not a complete safetensors file; copy it again") from error
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        named = _TENSOR.fullmatch(name)
        if named is None:
            raise AdapterError(f"the tensor {name[:128]!r} is not supported: only lora_A and lora_B of linear layers")
        if named["module"] not in layers:
            raise AdapterError(f"the model has no linear layer {named['module'][:128]!r} that an adapter may change")
        parts.setdefault(named["module"], {})[named["part"]] = tensor
    if not parts:
        raise AdapterError("the adapter holds no weights")
    return {module: _pair(module, pair, file.config, layers[module], dtype) for module, pair in parts.items()}


def _pair(
    module: str, parts: Mapping[str, torch.Tensor], config: AdapterConfig, layer: torch.nn.Linear, dtype: torch.dtype
) -> LoraPair:
    if parts.keys() != {"A", "B"}:
        raise AdapterError(f"{module} has only one of lora_A and lora_B")
    down, up, rank = parts["A"], parts["B"], config.rank
    wanted = (rank, layer.in_features), (layer.out_features, rank)
    if (tuple(down.shape), tuple(up.shape)) != wanted:
        raise AdapterError(
            f"{module}: lora_A is {list(down.shape)} and lora_B {list(up.shape)}; this model and rank need "
            f"{list(wanted[0])} and {list(wanted[1])}"
        )
    scaled = up.float().t() * config.scale
    pair = LoraPair(down.to(dtype).contiguous(), scaled.to(dtype).contiguous())
    # A product with another adapter's rows is zero only while all numbers are finite.
    if not bool(torch.isfinite(pair.down).all()) or not bool(torch.isfinite(pair.up).all()):
        raise AdapterError(f"{module} holds numbers that are not finite")
    return pair
