"""Packed linear layers compute what plain ones do, however the model calls them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from serve_app.engine.cpu import packed_linears, packed_products
from serve_app.engine.cpu.packed_linears import PackedLinear, pack_linears
from serve_app.engine.cpu.packed_products import Pack, Product, choose_packing
from tests.serve_app.engine.tiny import save_tiny

WIDTH = 64


def reference(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """A packing that any CPU has: a copy of the weights, multiplied by torch."""
    return partial(torch.nn.functional.linear, weight=weight.clone(), bias=bias)


@pytest.fixture(params=["reference", "of_this_cpu"])
def pack(request: pytest.FixtureRequest) -> Pack:
    if request.param == "reference":
        return reference
    found = choose_packing()
    if found is None:
        pytest.skip("this CPU packs no bfloat16 weights: it has neither AMX nor AVX-512")
    return found


def layers(sizes: list[int], biased: list[bool]) -> list[torch.nn.Linear]:
    torch.manual_seed(0)
    return [
        torch.nn.Linear(WIDTH, size, bias=bias, dtype=torch.bfloat16) for size, bias in zip(sizes, biased, strict=True)
    ]


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one.float(), other.float(), rtol=0.02, atol=0.02)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.sampled_from([16, 32, 80]), st.booleans()), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), min_size=1, max_size=12),
)
def test_any_order_of_calls_gives_each_layer_its_own_product(
    pack: Pack, shapes: list[tuple[int, bool]], calls: list[tuple[int, int]]
) -> None:
    """Layers called in any order, again and again, with this input or that: never another layer's or input's part."""
    plain = layers([size for size, _ in shapes], [bias for _, bias in shapes])
    inputs = [torch.randn(1, rows, WIDTH, dtype=torch.bfloat16) for rows in (3, 5)]
    with torch.inference_mode():
        together = PackedLinear(plain, pack)
        for index, which in calls:
            index %= len(plain)
            assert close(together.part(index, inputs[which]), plain[index](inputs[which]))


def test_nothing_of_a_step_is_kept_once_all_layers_were_called(pack: Pack) -> None:
    """What a step computed is as large as the step: it must not outlive it."""
    with torch.inference_mode():
        together = PackedLinear(layers([16, 32], [False, False]), pack)
        given_rows = torch.randn(1, 4, WIDTH, dtype=torch.bfloat16)
        for index in range(2):
            together.part(index, given_rows)
    assert together._input is None
    assert together._outputs == ()


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_a_packed_model_computes_the_plain_ones_logits(
    kind: str, pack: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every linear layer is packed, hooks still see their own layer, and plain weights are given up."""
    monkeypatch.setattr(packed_linears, "choose_packing", lambda: pack)
    path = save_tiny(kind, tmp_path)
    plain, packed = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval() for _ in range(2))
    linears = [one for one in packed.modules() if isinstance(one, torch.nn.Linear)]
    assert sum(len(one._sizes) for one in pack_linears(packed)) == len(linears)
    assert packed.get_input_embeddings().weight.device.type == "cpu"
    assert all(one.weight.is_meta for one in linears if one is not packed.get_output_embeddings())
    seen: list[torch.Size] = []
    packed.model.layers[0].self_attn.k_proj.register_forward_hook(lambda _, __, output: seen.append(output.shape))
    with torch.inference_mode():
        for length in (1, 7, 40):
            ids = torch.arange(length)[None] % 200
            one, other = packed(ids).logits, plain(ids).logits
            # Rounding differs with the order of additions: within a few per cent of the logits' own size.
            assert (one - other).abs().max() < 0.05 * other.abs().max()
    width = packed.model.layers[0].self_attn.k_proj.out_features
    assert [shape[-1] for shape in seen] == [width] * 3


def test_other_dtypes_stay_as_they_are(tmp_path: Path) -> None:
    """float32 is left to torch's own product."""
    model = AutoModelForCausalLM.from_pretrained(save_tiny("llama", tmp_path), dtype=torch.float32)
    assert pack_linears(model) == []
    assert not any(weight.is_meta for weight in model.parameters())


def test_where_no_packing_works_the_model_runs_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN's operators are not part of torch's public interface, and a kernel is believed only when it is right."""
    model = AutoModelForCausalLM.from_pretrained(save_tiny("llama", tmp_path), dtype=torch.bfloat16)

    def missing(*_: object) -> torch.Tensor:
        raise AttributeError("no such operator")

    for product in (missing, lambda self, x: x.new_zeros(*x.shape[:-1], 80)):
        monkeypatch.setattr(packed_products.OneDnnProduct, "__call__", product)
        monkeypatch.setattr(packed_products.AmxProduct, "__call__", product)
        assert pack_linears(model) == []
    assert not any(weight.is_meta for weight in model.parameters())
