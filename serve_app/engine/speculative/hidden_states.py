"""Hidden states of a few layers, taken out of an unmodified transformers model while it computes a step.

Forward hooks keep the states by KV slot. Without a tap a model has no hooks.
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

    def __init__(self, model: Any, layers: Sequence[int], num_slots: int, device: torch.device) -> None:
        """Attach the hooks. Raises ValueError where ``model`` has no list of its decoder layers."""
        embeddings, config = model.get_input_embeddings(), model.config
        self._layers = tuple(layers)
        self._row_of_slot = torch.zeros(num_slots, dtype=torch.long, device=device)
        self._step: dict[int, torch.Tensor] = {}
        self._states: torch.Tensor | None = None
        count = int(config.num_hidden_layers)
        lists = [part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part) == count]
        if not lists:
            name = type(model).__name__
            raise ValueError(f"{name} has no list of {count} decoder layers to read hidden states from")
        outputs = [embeddings, *lists[0]]
        for layer in set(layers):
            outputs[layer].register_forward_hook(self._keeping(layer))
        model.register_forward_hook(self._end_step, with_kwargs=True)

    def clear(self) -> None:
        """Forget every step; the states of a step are several times as large as its tokens' KV of one layer."""
        self._states = None

    def states(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the states [n, layers * hidden] of ``slots`` [n], all computed since ``clear``."""
        assert self._states is not None
        return self._states[self._row_of_slot[slots]]

    def _keeping(self, layer: int) -> Any:
        def keep(_: nn.Module, __: Any, output: Any) -> None:
            self._step[layer] = (output[0] if isinstance(output, tuple) else output)[0]

        return keep

    def _end_step(self, _: nn.Module, __: Any, kwargs: dict[str, Any], ___: Any) -> None:
        slots = kwargs["paged"].slots
        states = torch.cat([self._step.pop(layer)[: len(slots)] for layer in self._layers], dim=-1)
        before = 0 if self._states is None else len(self._states)
        self._row_of_slot[slots] = torch.arange(before, before + len(slots), device=slots.device)
        self._states = states if self._states is None else torch.cat([self._states, states])
