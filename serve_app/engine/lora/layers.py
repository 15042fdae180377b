"""LoRA on a packed step: forward hooks on linear layers add the product of its sequence's adapter to every row.

The adapters with slots lie side by side and share one pair of products; a mask limits every row to its own adapter.

An adapter's tensors are checked against the model first: a pair of matrices per layer, with the scale multiplied in.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch.utils.hooks import RemovableHandle

from serve_app.engine.adapter_slots import LoadedAdapters
from serve_app.engine.lora.peft_files import AdapterConfig, AdapterFile
from serve_app.engine.protocol import AdapterError
from serve_app.engine.step import Segment

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
    shapes = (rank, layer.in_features), (layer.out_features, rank)
    if (tuple(down.shape), tuple(up.shape)) != shapes:
        raise AdapterError(
            f"{module}: lora_A is {list(down.shape)} and lora_B {list(up.shape)}; this model and rank need "
            f"{list(shapes[0])} and {list(shapes[1])}"
        )
    scaled = up.float().t() * config.scale
    pair = LoraPair(down.to(dtype).contiguous(), scaled.to(dtype).contiguous())
    # A product with another adapter's rows is zero only while all numbers are finite.
    if not bool(torch.isfinite(pair.down).all()) or not bool(torch.isfinite(pair.up).all()):
        raise AdapterError(f"{module} holds numbers that are not finite")
    return pair


@dataclass(frozen=True, slots=True)
class LayerStack:
    """One layer's adapters side by side: ``down`` [sum of ranks, in], ``up`` [sum of ranks, out], and their ranks."""

    down: torch.Tensor
    up: torch.Tensor
    ranks: tuple[int, ...]


class LoraLayers:
    """The adapters of one model's linear layers. Used by the engine's thread alone; ``slots`` by any thread."""

    def __init__(
        self, layers: Mapping[str, torch.nn.Linear], slots: LoadedAdapters[AdapterWeights], device: torch.device
    ) -> None:
        self._layers = layers
        self._slots = slots
        self._device = device
        self._stacked: list[str] = []
        self._stacks: dict[str, LayerStack] = {}
        self._hooks: list[RemovableHandle] = []
        self._owners = torch.empty(0)
        self._masks: dict[tuple[int, ...], torch.Tensor] = {}

    def apply(self, segments: Sequence[Segment]) -> None:
        """Make the next step apply each segment's adapter to its rows; segments in the packed order."""
        keys = {segment.lora for segment in segments if segment.lora}
        if not keys:
            self._detach()
            return
        in_slots = self._slots.in_slots
        if not keys <= set(self._stacked) <= set(in_slots):
            self._detach()
            self._stack(in_slots)
        if not self._hooks:
            self._hooks = [
                self._layers[name].register_forward_hook(self._adding(stack)) for name, stack in self._stacks.items()
            ]
        owners = [self._stacked.index(segment.lora) if segment.lora else -1 for segment in segments]
        counts = torch.tensor([len(segment.token_ids) for segment in segments])
        self._owners = torch.tensor(owners).repeat_interleave(counts).to(self._device)
        self._masks.clear()

    def _detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _stack(self, keys: Sequence[str]) -> None:
        """Put the adapters of ``keys`` side by side and drop the others, which on a GPU frees their memory."""
        self._stacked, self._stacks = list(keys), {}
        weights = [self._slots.weights(key) for key in keys]
        for name in dict.fromkeys(name for adapter in weights for name in adapter):
            pairs = [adapter[name] for adapter in weights if name in adapter]
            self._stacks[name] = LayerStack(
                down=torch.cat([pair.down for pair in pairs]).to(self._device),
                up=torch.cat([pair.up for pair in pairs]).to(self._device),
                ranks=tuple(len(adapter[name].down) if name in adapter else 0 for adapter in weights),
            )

    def _adding(self, stack: LayerStack) -> Any:
        def add(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            x, y = inputs[0].flatten(0, -2), output.view(-1, output.shape[-1])
            rows = len(self._owners)
            hidden = torch.mm(x[:rows], stack.down.t()).masked_fill_(self._mask(stack.ranks), 0)
            y[:rows].addmm_(hidden, stack.up)

        return add

    def _mask(self, ranks: tuple[int, ...]) -> torch.Tensor:
        """Return the columns that are not each row's own [rows, sum of ranks], for adapters with these ``ranks``."""
        if ranks not in self._masks:
            numbers = torch.arange(len(ranks)).repeat_interleave(torch.tensor(ranks)).to(self._device)
            self._masks[ranks] = self._owners[:, None] != numbers[None]
        return self._masks[ranks]
