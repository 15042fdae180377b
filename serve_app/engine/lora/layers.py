"""LoRA on a packed step: every row gets its own sequence's adapter, over an unmodified transformers model.

Forward hooks on linear layers add the adapters' products. A step is cut into ranges of neighbouring rows; each range
has the adapters that it needs side by side in one pair of products, and a mask keeps every row to its own. A step
without adapters has no hooks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from serve_app.engine.attention.step_layout import PADDED_ROWS
from serve_app.engine.lora.slots import LoadedAdapters
from serve_app.engine.lora.weights import AdapterWeights, LoraPair
from serve_app.engine.step import Segment, ceil_div

SMALL_STEP_ROWS = 64
"""A step of up to this many rows is one range: fewer, larger products cost less than skipping other adapters' rows."""


@dataclass(frozen=True, slots=True)
class StackedAdapters:
    """One layer's adapters side by side. ``owners`` [sum of ranks]: each rank's adapter; ``ranks``: a key of that."""

    pair: LoraPair
    owners: torch.Tensor
    ranks: tuple[int, ...]

    def add(self, x: torch.Tensor, output: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Add the adapters' product of ``x`` [rows, in] to ``output`` [rows, out]; ``mask``: see ``RowRange.mask``."""
        hidden = torch.mm(x, self.pair.down.t())
        if mask is not None:
            hidden.masked_fill_(mask, 0)
        output.addmm_(hidden, self.pair.up)


@dataclass(frozen=True, slots=True)
class AdapterGroup:
    """Adapters that are applied together, by layer; ``keys[i]`` is the adapter whose number is i."""

    keys: tuple[str, ...]
    stacks: Mapping[str, StackedAdapters]


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows ``first`` to ``last`` - 1 of the step. ``rows``: the number of each row's adapter in the group, -1 for none.

    Without ``rows`` all of them have the group's only adapter.
    """

    first: int
    last: int
    group: AdapterGroup
    rows: torch.Tensor | None
    masks: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    def mask(self, stack: StackedAdapters) -> torch.Tensor:
        """Return where a row meets an adapter that is not its own, [rows, sum of ranks]; once for equal ranks."""
        assert self.rows is not None
        found = self.masks.get(stack.ranks)
        if found is None:
            found = self.masks[stack.ranks] = self.rows[:, None] != stack.owners[None, :]
        return found


class LoraLayers:
    """The adapters of one model's linear layers. Used by the engine's thread alone; ``slots`` by any."""

    def __init__(
        self,
        layers: Mapping[str, torch.nn.Linear],
        slots: LoadedAdapters[AdapterWeights],
        device: torch.device,
    ) -> None:
        self._layers = layers
        self._slots = slots
        self._device = device
        self._singles: dict[str, AdapterGroup] = {}
        self._together: AdapterGroup | None = None
        self._ranges: tuple[RowRange, ...] = ()
        self._hooks: dict[str, RemovableHandle] = {}

    @contextmanager
    def applied(self, segments: Sequence[Segment], order: Iterable[int], rows: int) -> Iterator[None]:
        """Apply each segment's adapter to its rows while the context lasts; ``rows`` counts padding too."""
        spans = _spans(segments, order)
        if not spans:
            self._detach()
            yield
            return
        self._forget_evicted()
        self._ranges = tuple(self._range(first, last, spans) for first, last in _cuts(spans, rows))
        self._attach()
        try:
            yield
        finally:
            self._ranges = ()

    def _range(self, first: int, last: int, spans: Sequence[tuple[str, int, int]]) -> RowRange:
        inside = [span for span in spans if span[1] < last and span[2] > first]
        group = self._group(tuple(dict.fromkeys(key for key, _, _ in inside)))
        covered = sum(min(stop, last) - max(start, first) for _, start, stop in inside)
        if len(group.keys) == 1 and covered == last - first:
            return RowRange(first, last, group, None)
        numbers = {key: number for number, key in enumerate(group.keys)}
        rows = torch.full((last - first,), -1, dtype=torch.int32)
        for key, start, stop in inside:
            rows[max(start - first, 0) : stop - first] = numbers[key]
        return RowRange(first, last, group, rows.to(self._device))

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
                stack = row_range.group.stacks.get(name)
                if stack is None:
                    continue
                mask = None if row_range.rows is None else row_range.mask(stack)
                stack.add(x[row_range.first : row_range.last], y[row_range.first : row_range.last], mask)

        return add


def _spans(segments: Sequence[Segment], order: Iterable[int]) -> list[tuple[str, int, int]]:
    """Return (key, first row, row after the last) of neighbouring rows with one adapter; base rows are left out."""
    spans: list[tuple[str, int, int]] = []
    row = 0
    for i in order:
        key, stop = segments[i].lora, row + len(segments[i].token_ids)
        if key:
            if spans and spans[-1][0] == key and spans[-1][2] == row:
                spans[-1] = (key, spans[-1][1], stop)
            else:
                spans.append((key, row, stop))
        row = stop
    return spans


def _cuts(spans: Sequence[tuple[str, int, int]], rows: int) -> list[tuple[int, int]]:
    """Return (first row, row after the last) of ranges; in a large step multiples of the padding: few shapes.

    Long spans are ranges of their own; short ones that lie close together (decoding rows, mostly) share one.
    """
    if rows <= SMALL_STEP_ROWS:
        return [(spans[0][1], spans[-1][2])]
    cuts: list[tuple[int, int]] = []
    small = False
    for _, start, stop in spans:
        first = start // PADDED_ROWS * PADDED_ROWS
        last = min(ceil_div(stop, PADDED_ROWS) * PADDED_ROWS, rows)
        is_small = stop - start <= SMALL_STEP_ROWS
        before = cuts[-1][1] if cuts else 0
        if cuts and small and is_small and first - before <= SMALL_STEP_ROWS:
            cuts[-1] = (cuts[-1][0], max(last, before))
        elif last > before:
            # Rows in two ranges would get their adapter twice.
            cuts.append((max(first, before), last))
            small = is_small
    return cuts


def _side_by_side(singles: Sequence[AdapterGroup]) -> AdapterGroup:
    stacks = {}
    for name in dict.fromkeys(name for single in singles for name in single.stacks):
        having = [(number, found) for number, one in enumerate(singles) if (found := one.stacks.get(name)) is not None]
        ranks = [0] * len(singles)
        for number, stack in having:
            ranks[number] = stack.pair.rank
        pair = LoraPair(
            torch.cat([stack.pair.down for _, stack in having]), torch.cat([stack.pair.up for _, stack in having])
        )
        owners = torch.cat([torch.full_like(stack.owners, number) for number, stack in having])
        stacks[name] = StackedAdapters(pair, owners, tuple(ranks))
    return AdapterGroup(tuple(single.keys[0] for single in singles), stacks)
