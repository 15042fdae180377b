"""LoRA on a packed step: forward hooks on linear layers add the product of its sequence's adapter to every row.

The adapters with slots lie side by side and share one pair of products; a mask limits every row to its own adapter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from serve_app.engine.adapter_slots import LoadedAdapters
from serve_app.engine.lora.weights import AdapterWeights
from serve_app.engine.step import Segment


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
