"""Hidden states of a few layers, taken out of an unmodified transformers model while it computes a step.

Forward hooks on those layers keep the states by KV slot. Without a tap a model has no hooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class HiddenTap:
    """Keeps the states that enter ``layers`` of a model; layer n of n layers means what leaves the last one.

    Steps are gathered until ``clear``; where two steps computed the same slot the later one counts.
    """

    def __init__(self, model: nn.Module, layers: Sequence[int], num_slots: int, device: torch.device) -> None:
        """Attach the hooks. Raises ValueError where the decoder layers of ``model`` cannot be found."""
        stack = decoder_layers(model)
        self._layers = tuple(layers)
        self._row_of_slot = torch.zeros(num_slots, dtype=torch.long, device=device)
        self._step: dict[int, torch.Tensor] = {}
        self._steps: list[tuple[torch.Tensor, ...]] = []
        self._rows = 0
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end)
        for layer in set(self._layers):
            if layer < len(stack):
                stack[layer].register_forward_pre_hook(self._entering(layer), with_kwargs=True)
            else:
                stack[-1].register_forward_hook(self._leaving(layer))

    def clear(self) -> None:
        """Forget every step; the states of a step are several times as large as its tokens' KV of one layer."""
        self._steps.clear()
        self._rows = 0

    def states(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the states [n, layers * hidden] of ``slots`` [n], all computed since ``clear``."""
        rows = self._row_of_slot[slots]
        parts = (torch.cat(every) if len(every) > 1 else every[0] for every in zip(*self._steps, strict=True))
        return torch.cat([part[rows] for part in parts], dim=-1)

    def _begin(self, _: nn.Module, __: Any, kwargs: dict[str, Any]) -> None:
        slots = kwargs["paged"].slots
        self._row_of_slot[slots] = torch.arange(self._rows, self._rows + len(slots), device=slots.device)

    def _end(self, *_: Any) -> None:
        kept = tuple(self._step[layer] for layer in self._layers)
        self._step = {}
        self._steps.append(kept)
        self._rows += len(kept[0])

    def _entering(self, layer: int) -> Any:
        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._step[layer] = (args[0] if args else kwargs["hidden_states"])[0]

        return keep

    def _leaving(self, layer: int) -> Any:
        def keep(_: nn.Module, __: Any, output: Any) -> None:
            self._step[layer] = (output[0] if isinstance(output, tuple) else output)[0]

        return keep


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Return the list of a model's decoder layers: the outermost one of that length. Raises ValueError without one."""
    config: Any = model.config
    count = int(config.num_hidden_layers)
    for part in model.modules():
        if isinstance(part, nn.ModuleList) and len(part) == count:
            return part
    raise ValueError(f"{type(model).__name__} has no list of {count} decoder layers to read hidden states from")
