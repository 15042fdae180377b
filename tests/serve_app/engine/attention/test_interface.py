"""Paged attention against the textbook formula, and the models it refuses."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import GptOssConfig, LlamaConfig, MistralConfig, Qwen3Config

from serve_app.engine.attention import runs_decode, runs_plan
from serve_app.engine.attention.interface import paged_attention
from serve_app.engine.attention.paging import KvPool
from serve_app.engine.attention.runs_backend import RUNS
from serve_app.engine.attention.supported import UnsupportedModel, refuse_unsupported
from serve_app.engine.step import Segment, block_runs

KV_HEADS, GROUP, DIM, SIZE = 2, 3, 8, 4


def plain_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int) -> torch.Tensor:
    """[T, heads, DIM] over [S, KV_HEADS, DIM] with positions from ``start``: the formula, in float64."""
    out = torch.empty(query.shape, dtype=torch.float64)
    for t in range(query.shape[0]):
        for head in range(query.shape[1]):
            seen = start + t + 1
            scores = key[:seen, head // GROUP].double() @ query[t, head].double() * DIM**-0.5
            out[t, head] = torch.softmax(scores, 0) @ value[:seen, head // GROUP].double()
    return out


@pytest.mark.parametrize("long_run", [8, 10**6], ids=["in place", "gathered"])
@pytest.mark.parametrize("folded", [1, 10**6], ids=["folded", "streamed"])
@pytest.mark.parametrize("pieces", [0, 10**6], ids=["past copied", "past in place"])
def test_a_mixed_step_equals_the_formula(
    long_run: int, folded: int, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks with and without a past, decodes over shared, forked, contiguous and scattered blocks, all in one step."""
    monkeypatch.setattr(runs_plan, "LONG_RUN_TOKENS", long_run)
    monkeypatch.setattr(runs_decode, "FOLDED_ROWS", folded)
    monkeypatch.setattr(runs_plan, "PIECES_IN_PLACE", pieces)
    generator = torch.Generator().manual_seed(0)
    pool = KvPool(1, 128, SIZE, KV_HEADS, DIM, torch.float32, torch.device("cpu"))
    shared = list(range(10, 20))
    cases = [
        (70, 0, list(range(60, 78))),
        (1, 40, [*shared, 30]),
        (1, 47, [*shared, 20, 31]),
        (1, 24, [*shared[:6], 33]),
        (9, 40, [*shared, 50, 44, 41]),
        (1, 14, [5, 3, 1, 9]),
        (1, 0, [100]),
        (37, 3, [*range(110, 118), 101, 105]),
        (6, 9, [120, 122, 121, 119]),
    ]
    for block_kv in (pool.keys[0], pool.values[0]):
        block_kv.copy_(torch.randn(block_kv.shape, generator=generator))
    segments = [
        Segment(np.zeros(tokens, dtype=np.int32), start, blocks, block_runs(blocks), None)
        for tokens, start, blocks in cases
    ]
    step = RUNS.plan(pool, segments)
    tokens = sum(case[0] for case in cases)
    query, key, value = (torch.randn(1, heads, tokens, DIM, generator=generator) for heads in (6, 2, 2))
    module = SimpleNamespace(layer_idx=0)
    found, _ = paged_attention(module, query, key, value, None, paged=step, scaling=DIM**-0.5)  # type: ignore[arg-type]
    row = 0
    for i in step.order:
        count, start, blocks = cases[i]
        slots = (torch.tensor(blocks)[:, None] * SIZE + torch.arange(SIZE)).flatten()[: start + count]
        assert torch.equal(pool.keys[0][slots[start:]], key[0, :, row : row + count].transpose(0, 1))
        expected = plain_attention(
            query[0, :, row : row + count].transpose(0, 1), pool.keys[0][slots], pool.values[0][slots], start
        )
        torch.testing.assert_close(found[0, row : row + count].double(), expected, atol=2e-6, rtol=1e-5)
        row += count
    assert row == tokens


def test_what_an_earlier_owner_left_in_a_block_is_not_seen() -> None:
    """Not-a-number left beyond a sequence's end would survive a mask; a block is cleaned when it is begun."""
    pool = KvPool(1, 4, SIZE, KV_HEADS, DIM, torch.float32, torch.device("cpu"))
    pool.tensor.fill_(float("nan"))
    segment = Segment(np.zeros(1, dtype=np.int32), 0, [2], [(2, 1)], None)
    step = RUNS.plan(pool, [segment])
    heads = (torch.ones(1, h, 1, DIM) for h in (6, 2, 2))
    found, _ = paged_attention(SimpleNamespace(layer_idx=0), *heads, None, paged=step)  # type: ignore[arg-type,misc]
    assert torch.equal(found, torch.ones(1, 1, 6, DIM))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (MistralConfig(sliding_window=4096), "sliding_window"),
        (Qwen3Config(num_hidden_layers=4, use_sliding_window=True, sliding_window=64, max_window_layers=2), "sliding"),
        (SimpleNamespace(model_type="g", layer_types=None, attn_logit_softcapping=50.0), "soft-capped"),
        (GptOssConfig(num_hidden_layers=2), "sliding"),
        (LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "rope_type=dynamic"),
    ],
)
def test_models_this_engine_would_get_wrong_are_refused(config: object, words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        refuse_unsupported(config)


def test_sinks_are_refused_by_their_parameters() -> None:
    model = torch.nn.Module()
    model.register_parameter("sinks", torch.nn.Parameter(torch.zeros(2)))
    with pytest.raises(UnsupportedModel, match="sinks"):
        refuse_unsupported(LlamaConfig(), model)


def test_plain_models_pass() -> None:
    for config in (LlamaConfig(), Qwen3Config(), MistralConfig(sliding_window=None)):
        refuse_unsupported(config)
