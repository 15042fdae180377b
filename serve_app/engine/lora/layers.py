"""LoRA on a packed step: every row gets its own sequence's adapter, over an unmodified transformers model.

Forward hooks on linear layers add the adapters' products. All decode rows share one pair of products, in which a mask
keeps every row to its own adapter; a prefill chunk has a pair of its own. A step without adapters has no hooks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from serve_app.engine.lora.slots import LoadedAdapters
from serve_app.engine.lora.weights import AdapterWeights, LoraPair
from serve_app.engine.step import Segment


@dataclass(frozen=True, slots=True)
class StackedAdapters:
    """One layer's adapters side by side. ``owners`` [sum of ranks]: each rank's adapter; ``ranks``: a key of that."""

    pair: LoraPair
    owners: torch.Tensor
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AdapterGroup:
    """Adapters that are applied together, by layer; ``keys[i]`` is the adapter whose number is i."""

    keys: tuple[str, ...]
    stacks: Mapping[str, StackedAdapters]


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows ``first`` to ``last`` - 1 of the step. ``numbers`` [rows]: each row's adapter in the group, -1 for none.

    Without ``numbers`` all of them have the group's only adapter.
    """

    first: int
    last: int
    group: AdapterGroup
    numbers: torch.Tensor | None = None
    masks: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    def add(self, name: str, x: torch.Tensor, output: torch.Tensor) -> None:
        """Add the adapters' products in layer ``name``: of ``x`` [T, in] to ``output`` [T, out], in this range."""
        stack = self.group.stacks.get(name)
        if stack is None:
            return
        hidden = torch.mm(x[self.first : self.last], stack.pair.down.t())
        if self.numbers is not None:
            if stack.ranks not in self.masks:
                self.masks[stack.ranks] = self.numbers[:, None] != stack.owners[None, :]
            hidden.masked_fill_(self.masks[stack.ranks], 0)
        output[self.first : self.last].addmm_(hidden, stack.pair.up)


class LoraLayers:
    """The adapters of one model's linear layers. Used by the engine's thread alone; ``slots`` by any."""

    def __init__(
        self, layers: Mapping[str, torch.nn.Linear], slots: LoadedAdapters[AdapterWeights], device: torch.device
    ) -> None:
        self._layers = layers
        self._slots = slots
        self._device = device
        self._singles: dict[str, AdapterGroup] = {}
        self._together: AdapterGroup | None = None
        self._ranges: tuple[RowRange, ...] = ()
        self._hooks: dict[str, RemovableHandle] = {}

    @contextmanager
    def applied(self, segments: Sequence[Segment]) -> Iterator[None]:
        """Apply each segment's adapter to its rows while the context lasts; segments in the packed order."""
        if not any(segment.lora for segment in segments):
            self._detach()
            yield
            return
        self._forget_evicted()
        self._ranges = tuple(self._row_ranges(segments))
        self._attach()
        try:
            yield
        finally:
            self._ranges = ()

    def _row_ranges(self, segments: Sequence[Segment]) -> Iterator[RowRange]:
        """Yield disjoint ranges that cover every row with an adapter; single tokens come first in a packed step."""
        decodes = [segment.lora for segment in segments if len(segment.token_ids) == 1]
        keys = tuple(dict.fromkeys(key for key in decodes if key))
        if keys:
            group = self._group(keys)
            numbers = None
            if len({*decodes}) > 1:
                number = {key: i for i, key in enumerate(group.keys)}
                numbers = torch.tensor([number.get(key, -1) for key in decodes], dtype=torch.int32, device=self._device)
            yield RowRange(0, len(decodes), group, numbers)
        first = len(decodes)
        for segment in segments[first:]:
            last = first + len(segment.token_ids)
            if segment.lora:
                yield RowRange(first, last, self._single(segment.lora))
            first = last

    def _group(self, keys: tuple[str, ...]) -> AdapterGroup:
        if len(keys) == 1:
            return self._single(keys[0])
        together = self._together
        if together is None or not set(keys) <= set(together.keys):
            # All that hold slots, so that the stack is not built anew whenever another mix of them is in a step.
            singles = [self._single(key) for key in {*self._slots.in_slots, *keys}]
            together = self._together = _side_by_side(singles)
        return together

    def _single(self, key: str) -> AdapterGroup:
        group = self._singles.get(key)
        if group is None:
            stacks = {}
            for name, pair in self._slots.weights(key).items():
                placed = pair.to(self._device)
                owners = torch.zeros(pair.rank, dtype=torch.int32, device=self._device)
                stacks[name] = StackedAdapters(placed, owners, (pair.rank,))
            group = self._singles[key] = AdapterGroup((key,), stacks)
        return group

    def _forget_evicted(self) -> None:
        """Let go of what no longer holds a slot; on a GPU this is what frees its memory."""
        kept = set(self._slots.in_slots)
        for key in self._singles.keys() - kept:
            del self._singles[key]
        if self._together is not None and not set(self._together.keys) <= kept:
            self._together = None

    def _attach(self) -> None:
        for row_range in self._ranges:
            for name in row_range.group.stacks.keys() - self._hooks.keys():
                self._hooks[name] = self._layers[name].register_forward_hook(self._hook(name))

    def _detach(self) -> None:
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()

    def _hook(self, name: str) -> Any:
        def add(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            x, y = inputs[0].flatten(0, -2), output.view(-1, output.shape[-1])
            for row_range in self._ranges:
                row_range.add(name, x, y)

        return add


def _side_by_side(singles: Sequence[AdapterGroup]) -> AdapterGroup:
    stacks = {}
    for name in dict.fromkeys(name for single in singles for name in single.stacks):
        layer = {number: single.stacks[name] for number, single in enumerate(singles) if name in single.stacks}
        pairs = [stack.pair for stack in layer.values()]
        owners = torch.cat([torch.full_like(stack.owners, number) for number, stack in layer.items()])
        ranks = tuple(layer[number].pair.rank if number in layer else 0 for number in range(len(singles)))
        pair = LoraPair(torch.cat([pair.down for pair in pairs]), torch.cat([pair.up for pair in pairs]))
        stacks[name] = StackedAdapters(pair, owners, ranks)
    return AdapterGroup(tuple(single.keys[0] for single in singles), stacks)
