"""Rules of sampling: filters, reproducibility, and the noise that draws."""

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
    """Whether numbers from 0 to 1 are spread evenly: their chi-square over 20 bins."""
    counts = np.histogram(uniform, bins=20, range=(0, 1))[0]
    assert counts.sum() == len(uniform)
    # 19 degrees of freedom: over 43.8 once in a thousand seeds, and those of the tests are fixed.
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


@pytest.mark.parametrize("temperature", [0.0, 1e-310, 5e-324, 1e-300, 9.9e-6])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    """Logits divided by it could be infinite. From 1e-5 on the noise still decides between equal ones."""
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(2)).abs()
    params = [SamplingParams(max_tokens=1, temperature=temperature, seed=i, top_k=i) for i in range(6)]
    assert choose_tokens(logits, params, range(6)) == logits.argmax(dim=-1).tolist()
    for near, tokens in ((temperature, {0}), (1e-5, {0, 1})):
        drawn = [SamplingParams(max_tokens=1, temperature=near, seed=seed) for seed in range(20)]
        assert set(choose_tokens(torch.ones(20, 2), drawn, range(20))) == tokens


# No top-p here is a sum of equal probabilities: rounding would decide.
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
@given(st.lists(row_params, min_size=1, max_size=6), st.integers(0, 10**6), st.booleans(), st.sampled_from([3, 300]))
def test_every_row_gets_the_likeliest_of_the_oracles_support_and_noise(
    params: list[SamplingParams], seed: int, flat: bool, vocab: int
) -> None:
    """Ties included, however wide the candidates have to get, and whatever is in the batch beside it."""
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
    with patch.object(sampling, "_FIRST_CANDIDATES", 4):
        assert choose_tokens(logits, params, range(len(params))) == expected
    assert choose_tokens(logits, params, range(len(params))) == expected


def test_a_seed_gives_the_same_tokens_alone_in_a_batch_and_after_a_resend(make_engine: MakeEngine) -> None:
    """Also when a part of the output comes back as prompt: position p draws the same number. (docs/determinism.md)"""
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
    """And the others get theirs."""
    logits = torch.zeros(5, 40)
    logits[torch.arange(5), torch.tensor([3, 9, 1, 0, 39])] = 30.0
    logits[1, 5], logits[2, 7], logits[3] = float("nan"), float("inf"), float("-inf")
    params = [SamplingParams(1, temperature=t) for t in (0.0, 1.0, 0.0, 1.0, 1.0)]
    assert choose_tokens(logits.to(device), params, [0] * 5) == [3, None, None, None, 39]
