"""Law of packed LoRA: whatever is in a step, each row has its own adapter's product, once. docs/lora.md"""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from serve_app.engine.adapter_slots import LoadedAdapters
from serve_app.engine.lora.layers import LoraLayers
from serve_app.engine.lora.weights import AdapterWeights, LoraPair
from serve_app.engine.protocol import AdapterSpec
from serve_app.engine.step import Segment

WIDTH = 6
RANKS = {"a": {"x": 2}, "b": {"x": 3, "y": 1}, "c": {"y": 2}}
"""Of each adapter the layers that it changes, and their ranks."""


def _weights() -> dict[str, AdapterWeights]:
    drawn = torch.Generator().manual_seed(1)
    return {
        key: {
            name: LoraPair(*(torch.randn(rank, WIDTH, generator=drawn) for _ in range(2)))
            for name, rank in layers.items()
        }
        for key, layers in RANKS.items()
    }


steps = st.lists(st.tuples(st.sampled_from(["", *RANKS]), st.sampled_from([1, 1, 2, 40])), min_size=1, max_size=9)


@given(sequence=st.lists(steps, min_size=1, max_size=3))
def test_each_row_has_its_own_adapter_once(sequence: list[list[tuple[str, int]]]) -> None:
    weights = _weights()
    slots: LoadedAdapters[AdapterWeights] = LoadedAdapters(
        lambda spec: weights[spec.name], max_loras=3, max_cpu_loras=3
    )
    layers = {name: torch.nn.Linear(WIDTH, WIDTH) for name in ("x", "y")}
    lora = LoraLayers(layers, slots, torch.device("cpu"))
    for key in RANKS:
        spec = AdapterSpec(key, "0", "")
        slots.load(spec)
        weights[spec.key] = weights[key]
    for step in sequence:
        packed = sorted(step, key=lambda part: part[1] > 1)
        named = [(AdapterSpec(key, "0", "").key if key else "", count) for key, count in packed]
        for key, _ in named:
            slots.acquire(key)
        segments = [Segment(np.zeros(count, np.int32), 0, [], [], None, lora=key) for key, count in named]
        rows = torch.randn(1, sum(count for _, count in named) + 3, WIDTH)
        lora.apply(segments)
        with torch.inference_mode():
            outputs = {name: layer(rows)[0] for name, layer in layers.items()}
        owner = [key for key, count in named for _ in range(count)] + [""] * 3
        for name, layer in layers.items():
            plain = rows[0] @ layer.weight.t() + layer.bias
            for row, key in enumerate(owner):
                pair = weights[key].get(name) if key else None
                product = 0 if pair is None else rows[0, row] @ pair.down.t() @ pair.up
                torch.testing.assert_close(outputs[name][row], plain[row] + product, rtol=1e-4, atol=1e-4)
        for key, _ in named:
            slots.release(key)
