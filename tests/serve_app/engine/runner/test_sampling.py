"""Rules of sampling: filters, reproducibility, and the noise for the draws."""

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.engine.protocol import SamplingParams
from serve_app.engine.runner import sampling
from serve_app.engine.runner.sampling import choose_tokens, gumbel_noise
from tests.serve_app.conftest import MakeEngine
from tests.serve_app.engine.tiny import prompt, request, run_all

CPU = torch.device("cpu")


def kept_tokens(logits: torch.Tensor, params: SamplingParams) -> set[int]:
    """The oracle: the support after temperature, min-p, top-k, top-p, written as plainly as possible."""
    values = (logits.double() / params.temperature).tolist()
    order = sorted(range(len(values)), key=lambda i: -values[i])
    if params.min_p:
        order = [i for i in order if np.exp(values[i] - values[order[0]]) >= params.min_p]
    if params.top_k:
        floor = values[order[min(params.top_k, len(order)) - 1]]
        order = [i for i in order if values[i] >= floor]
    weights = np.exp(np.array([values[i] for i in order]) - values[order[0]])
    mass = np.cumsum(weights / weights.sum())
    if params.top_p < 1.0:
        last = int(np.argmax(mass >= params.top_p)) if (mass >= params.top_p).any() else len(order) - 1
        order = [i for i in order if values[i] >= values[order[last]]]
    return set(order)


def even(uniform: Any) -> bool:
    """Return whether numbers from 0 to 1 are spread evenly: their chi-square over 20 bins."""
    counts = np.histogram(uniform, bins=20, range=(0, 1))[0]
    assert counts.sum() == len(uniform)
    # 19 degrees of freedom: over 43.8 once in a thousand seeds, and the tests' seeds are fixed.
    return bool(((counts - len(uniform) / 20) ** 2 / (len(uniform) / 20)).sum() < 43.8)


def test_noise_is_gumbel_even_and_depends_on_seed_and_position_alone() -> None:
    """exp(-exp(-g)) is uniform; rows and neighbours in a row are not related."""
    noise = gumbel_noise([3, 3, 5, -1], [7, 8, 7, 7], 20000, CPU)
    assert torch.equal(noise[1:2], gumbel_noise([3], [8], 20000, CPU))
    uniform = torch.exp(-torch.exp(-noise)).numpy()
    assert all(even(row) for row in uniform)
    centred = uniform - 0.5
    related = [centred[0] @ centred[1], centred[0] @ centred[2], centred[0][1:] @ centred[0][:-1]]
    # The sum of 20,000 products of variance 1 / 144 has a deviation of 11.8.
    assert max(map(abs, related)) < 4 * 11.8


def splitmix(seed: int, position: int, token: int) -> float:
    """The oracle: a token's number by splitmix64's definition, in whole numbers and then float32."""

    def mixed(value: int) -> int:
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
        return value ^ (value >> 31)

    golden = 0x9E3779B97F4A7C15
    key = mixed(((seed % 2**64 ^ mixed((position + golden) % 2**64)) + golden) % 2**64)
    uniform = torch.tensor(mixed((key + (token + 1) * golden) % 2**64) >> 1).float() * 2.0**-63
    return float(-torch.log(-torch.log1p(-uniform.clamp(2.0**-63, 1.0 - 2.0**-24))))


@given(st.integers(0, 2**64 - 1), st.integers(0, 10**6), st.integers(1, 700), st.data())
def test_noise_is_splitmix64s(seed: int, position: int, vocab: int, data: st.DataObject) -> None:
    """The definition fixes the noise, so that one version can continue an answer of another."""
    tokens = data.draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=5))
    found = gumbel_noise([seed], [position], vocab, CPU)[0, tokens].tolist()
    assert found == pytest.approx([splitmix(seed, position, token) for token in tokens], rel=1e-6)


NUMBERS = st.sampled_from([-1.0, 0.0, 2.5, float("nan"), float("-inf")])


@given(st.lists(st.lists(NUMBERS, min_size=12, max_size=12), min_size=1), st.sampled_from([2, 4, 8, 32]))
def test_a_rows_first_largest_is_torchs(rows: list[list[float]], block: int) -> None:
    """This includes ties and values that are not numbers."""
    values = torch.tensor(rows)
    with patch.object(sampling, "_BLOCK", block):
        found, wanted = sampling._first_largest(values), torch.max(values, dim=-1)
    assert torch.equal(found[1], wanted.indices)
    assert found[0].tolist() == pytest.approx(wanted.values.tolist(), nan_ok=True)


@pytest.mark.parametrize("temperature", [0.0, 1e-310, 5e-324, 1e-300, 9.9e-6])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    """Logits divided by it could be infinite. From 1e-5 on the noise still decides between equal ones."""
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(2)).abs()
    params = [SamplingParams(max_tokens=1, temperature=temperature, seed=i, top_k=i) for i in range(6)]
    assert choose_tokens(logits, params, range(6)) == logits.argmax(dim=-1).tolist()
    for near, tokens in ((temperature, {0}), (1e-5, {0, 1})):
        drawn = [SamplingParams(max_tokens=1, temperature=near, seed=seed) for seed in range(20)]
        assert set(choose_tokens(torch.ones(20, 2), drawn, range(20))) == tokens


# No top-p here is a sum of equal probabilities, for which rounding would decide.
row_params = st.builds(
    SamplingParams,
    st.just(1),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.3, 4.0]),
    top_k=st.sampled_from([0, 1, 2, 7, 299, 300, 1000]),
    top_p=st.sampled_from([1e-6, 0.1907, 0.4703, 0.9003, 0.999999, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 9),
)


@settings(max_examples=300)
@given(
    st.lists(row_params, min_size=1, max_size=6), st.integers(0, 10**6), st.booleans(), st.sampled_from([3, 300, 700])
)
def test_every_row_gets_the_likeliest_of_the_oracles_support_and_noise(
    params: list[SamplingParams], seed: int, flat: bool, vocab: int
) -> None:
    """This includes ties, for any number of candidates and any other rows in the batch."""
    logits = torch.randn(len(params), vocab, generator=torch.Generator().manual_seed(seed)) * 2
    logits = logits.round() if flat else logits
    expected = []
    for row, p in enumerate(params):
        if p.greedy:
            expected.append(int(logits[row].argmax()))
            continue
        noise = gumbel_noise([p.seed], [row], vocab, CPU)[0].double()
        drawn = (logits[row].double() / p.temperature + noise).tolist()
        expected.append(max(kept_tokens(logits[row], p), key=lambda token: drawn[token]))
    with patch.object(sampling, "_FIRST_CANDIDATES", 4), patch.object(sampling, "_CACHED_NUMBERS", 600):
        assert choose_tokens(logits, params, range(len(params))) == expected
    assert choose_tokens(logits, params, range(len(params))) == expected


def test_a_seed_gives_the_same_tokens_alone_in_a_batch_and_after_a_resend(make_engine: MakeEngine) -> None:
    """A part of the output may return as prompt: position p still draws the same number. (docs: caching)"""
    engine = make_engine()
    ids = prompt(37)
    how = {"temperature": 0.9, "top_p": 0.95, "seed": 12345}
    alone = run_all(engine, [request("alone", ids, 24, **how)]).tokens["alone"]
    others = [request(f"o{i}", prompt(10 + i, i), 24, temperature=1.0, seed=i) for i in range(6)]
    assert run_all(engine, [request("batch", ids, 24, **how), *others]).tokens["batch"] == alone
    resent = np.concatenate([ids, np.array(alone[:9], dtype=np.int32)])
    assert run_all(engine, [request("resent", resent, 15, **how)]).tokens["resent"] == alone[9:]
    assert run_all(engine, [request("else", ids, 24, **{**how, "seed": 1})]).tokens["else"] != alone


def test_rows_that_are_no_numbers_get_no_token(device: torch.device) -> None:
    """The other rows get theirs."""
    logits = torch.zeros(5, 40)
    logits[torch.arange(5), torch.tensor([3, 9, 1, 0, 39])] = 30.0
    logits[1, 5], logits[2, 7], logits[3] = float("nan"), float("inf"), float("-inf")
    params = [SamplingParams(1, temperature=t) for t in (0.0, 1.0, 0.0, 1.0, 1.0)]
    assert choose_tokens(logits.to(device), params, [0] * 5) == [3, None, None, None, 39]


def test_a_gpu_chooses_the_same_tokens(device: torch.device) -> None:
    """Every filter, alone and together, in one batch."""
    filters: list[dict[str, Any]] = [{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.02}, {"top_k": 300, "top_p": 0.99}]
    params = [SamplingParams(1, t, seed=s, **f) for f in filters for t in (0.0, 0.7, 1.0) for s in (0, 2**63 + 1)]
    logits = 3 * torch.randn(len(params), 4096, generator=torch.Generator().manual_seed(0))
    positions = list(range(100, 100 + len(params)))
    assert choose_tokens(logits.to(device), params, positions) == choose_tokens(logits, params, positions)
