"""Our packed product against the formula in float64, at every remainder of its tiles and blocks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serve_app.engine.cpu import packed_products
from serve_app.engine.cpu.amx.library import AmxLinear, NoAmx, load_linear
from serve_app.engine.cpu.packed_products import AmxProduct, OneDnnProduct, choose_packing


@pytest.fixture(scope="module")
def library() -> AmxLinear:
    try:
        return load_linear()
    except NoAmx as why:
        pytest.skip(f"no AMX kernel here: {why}")


@given(
    rows=st.one_of(st.integers(1, 70), st.integers(250, 600)),
    wide=st.integers(1, 30),
    out=st.integers(1, 140),
    biased=st.booleans(),
)
@example(rows=1, wide=1, out=1, biased=False)
@example(rows=513, wide=42, out=33, biased=True)
@example(rows=40, wide=700, out=64, biased=False)
@settings(max_examples=60)
def test_a_product_is_the_formula(library: AmxLinear, rows: int, wide: int, out: int, biased: bool) -> None:
    """Rows, inputs and outputs that fill no tile, panel or block; what lies behind the result stays as it is."""
    generator = torch.Generator().manual_seed(rows * 1000 + out)
    weight = torch.randn(out, 32 * wide, generator=generator).bfloat16()
    bias = torch.randn(out, generator=generator).bfloat16() if biased else None
    rows_given = torch.randn(rows, 32 * wide, generator=generator).bfloat16()
    found = AmxProduct(library, weight, bias)(rows_given)
    expected = torch.nn.functional.linear(rows_given.double(), weight.double(), None if bias is None else bias.double())
    assert found.shape == expected.shape
    # One rounding to bfloat16 at the end, and sums in float32 before.
    assert ((found.double() - expected).abs() <= expected.abs() / 256 + 1e-3).all()
    assert torch.equal(found[:1], AmxProduct(library, weight, bias)(rows_given[:1]))


def test_more_dimensions_and_gaps_in_memory(library: AmxLinear) -> None:
    weight = torch.randn(48, 64).bfloat16()
    rows = torch.randn(2, 3, 128).bfloat16()[..., :64]
    found = AmxProduct(library, weight, None)(rows)
    assert torch.allclose(found.float(), torch.nn.functional.linear(rows, weight).float(), rtol=0.02, atol=0.05)
    assert AmxProduct(library, weight, None)(rows[:0]).shape == (0, 3, 48)


def test_a_number_that_is_none_stays_in_its_row(library: AmxLinear) -> None:
    rows = torch.ones(20, 64).bfloat16()
    rows[3] = float("nan")
    found = AmxProduct(library, torch.ones(40, 64).bfloat16(), None)(rows)
    assert found[3].isnan().all()
    assert (found[[0, 1, 2, *range(4, 20)]] == 64).all()


def test_rows_of_another_kind_are_refused(library: AmxLinear) -> None:
    """An address has no type: what would be misread never gets there."""
    product = AmxProduct(library, torch.ones(40, 64).bfloat16(), None)
    for rows in (torch.ones(2, 64), torch.ones(2, 32).bfloat16()):
        with pytest.raises(TypeError, match="rows of 64 bfloat16 numbers are wanted"):
            product(rows)


def test_no_memory_is_an_error(library: AmxLinear, monkeypatch: pytest.MonkeyPatch) -> None:
    product = AmxProduct(library, torch.ones(40, 64).bfloat16(), None)
    monkeypatch.setattr(library, "linear", lambda *_: -1)
    with pytest.raises(MemoryError, match="no memory"):
        product(torch.ones(1, 64).bfloat16())


def test_inputs_that_fill_no_tile_are_left_to_torch(library: AmxLinear) -> None:
    pack = choose_packing()
    assert pack is not None
    layer = torch.nn.Linear(40, 24, dtype=torch.bfloat16)
    rows = torch.randn(3, 40).bfloat16()
    assert torch.equal(pack(layer.weight.detach(), layer.bias.detach())(rows), layer(rows))


def test_without_our_kernel_onednn_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Callable[..., object]:
        raise NoAmx("there is no C compiler (gcc)")

    monkeypatch.setattr(packed_products, "load_linear", missing)
    monkeypatch.setattr(packed_products, "_right", lambda pack: True)  # not every CPU has what oneDNN's packing needs
    assert choose_packing() is OneDnnProduct


def test_onednn_is_left_out_where_it_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without AVX-512 has no such product: the models run as they are."""

    def missing(*_: object) -> object:
        raise RuntimeError("bf16 path needs the cpu support avx512bw")

    monkeypatch.setattr(packed_products, "load_linear", lambda: (_ for _ in ()).throw(NoAmx("no AMX")))
    monkeypatch.setattr(packed_products.OneDnnProduct, "__init__", missing)
    assert choose_packing() is None
