"""Linear layers with weights packed once, and sibling layers computed in one product.

The model's modules stay what and where they are (LoRA's hooks too); only how they compute is replaced. For bfloat16
on CPUs; elsewhere nothing is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from serve_app.engine.cpu.packed_products import Pack, choose_packing

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one module that Llama- and Qwen-style models call one after the other with the same input."""


class PackedLinear:
    """One product for layers that get the same input: the first one called computes for all.

    The others take their part of it as long as they are called with the very same tensor. With another one they compute
    anew: a model that calls them otherwise is slower, not wrong.
    """

    def __init__(self, layers: Sequence[torch.nn.Linear], pack: Pack) -> None:
        self._sizes = [layer.out_features for layer in layers]
        weight = (
            torch.cat([layer.weight.detach() for layer in layers]) if len(layers) > 1 else layers[0].weight.detach()
        )
        biases = [layer.bias for layer in layers]
        bias: torch.Tensor | None = None
        if any(one is not None for one in biases):
            zeros = [weight.new_zeros(size) for size in self._sizes]
            bias = torch.cat([z if b is None else b.detach() for z, b in zip(zeros, biases, strict=True)])
        self._compute = pack(weight, bias)
        self._input: torch.Tensor | None = None
        self._outputs: tuple[torch.Tensor, ...] = ()
        self._left = 0

    def part(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Return one layer's output [..., out_features] of ``x`` [..., in]; replaces that layer's ``forward``."""
        if len(self._sizes) == 1:
            return self._compute(x)
        if self._input is not x:
            self._input, self._left = x, len(self._sizes)
            self._outputs = torch.split(self._compute(x), self._sizes, dim=-1)
        output = self._outputs[index]
        self._left -= 1
        if not self._left:  # all layers have had their part: keep no memory of this step
            self._input, self._outputs = None, ()
        return output


def pack_linears(model: torch.nn.Module) -> list[PackedLinear]:
    """Replace how the model's linear layers compute; return their products, none where packing does not help.

    The plain weights of packed layers are dropped, but for the embeddings' and the output layer's, which others read.
    """
    weights = {weight.dtype for weight in model.parameters()} | {weight.device.type for weight in model.parameters()}
    if weights != {torch.bfloat16, "cpu"} or (pack := choose_packing()) is None:
        return []
    output = getattr(model, "get_output_embeddings", lambda: None)()
    packed: list[PackedLinear] = []
    for parent in model.modules():
        linears = {name: one for name, one in parent.named_children() if type(one) is torch.nn.Linear}
        for names in _groups(linears):
            layers = [linears[name] for name in names]
            together = PackedLinear(layers, pack)
            packed.append(together)
            for index, layer in enumerate(layers):
                layer.forward = partial(together.part, index)  # type: ignore[method-assign]
                if layer is not output:
                    layer.weight = torch.nn.Parameter(layer.weight.to("meta"), requires_grad=False)
    return packed


def _groups(linears: dict[str, torch.nn.Linear]) -> list[tuple[str, ...]]:
    found = [
        names
        for names in SIBLINGS
        if linears.keys() >= set(names) and len({linears[name].in_features for name in names}) == 1
    ]
    grouped = {name for names in found for name in names}
    return [*found, *((name,) for name in linears if name not in grouped)]
