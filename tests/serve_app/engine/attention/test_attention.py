"""A packed step attends by the formula for any shared prefixes; cases that it would get wrong are refused."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GptOssConfig, LlamaConfig, MistralConfig, Qwen3Config

from serve_app.engine.attention import paging as reads
from serve_app.engine.attention.interface import paged_attention
from serve_app.engine.attention.paging import KvPool, plan_step
from serve_app.engine.attention.supported import UnsupportedModel, refuse_unsupported
from serve_app.engine.protocol import SamplingParams
from serve_app.engine.step import Segment, block_runs, ceil_div
from tests.serve_app.conftest import MakeEngine, Reference
from tests.serve_app.engine.tiny import prompt, request, run_all

SIZE, KV_HEADS, DIM = 4, 2, 16

Case = tuple[int, int, list[int]]
"""(new tokens, tokens before them, blocks) of one sequence."""


@st.composite
def steps(draw: st.DrawFn) -> list[Case]:
    """Several sequences over neighbouring or scattered blocks, some of which share their first blocks."""
    length = st.one_of(st.just(1), st.integers(1, 30))
    shapes = draw(st.lists(st.tuples(length, st.integers(0, 90), st.integers(0, 20)), min_size=1, max_size=6))
    shapes = [(new, past, min(shared, past // SIZE)) for new, past, shared in shapes]
    needed = sum(ceil_div(new + past, SIZE) - shared for new, past, shared in shapes)
    blocks = draw(st.one_of(st.just([*range(needed + 20)]), st.permutations(range(needed + 20))))
    common, own = blocks[:20], blocks[20:]
    cases = []
    for new, past, shared in shapes:
        count = ceil_div(new + past, SIZE) - shared
        cases.append((new, past, [*common[:shared], *own[:count]]))
        own = own[count:]
    return cases


def segments_of(cases: list[Case]) -> list[Segment]:
    """Return segments of which every second wants a token."""
    wanted = (None, SamplingParams(1))
    return [
        Segment(np.zeros(new, dtype=np.int32), past, blocks, block_runs(blocks), wanted[i % 2])
        for i, (new, past, blocks) in enumerate(cases)
    ]


@torch.inference_mode()
def check(
    cases: list[Case], group: int, dtype: torch.dtype, *, in_place: bool, device: torch.device | str = "cpu"
) -> None:
    generator = torch.Generator().manual_seed(1)
    device = torch.device(device)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    pool = KvPool(1, max(b for *_, blocks in cases for b in blocks) + 1, SIZE, KV_HEADS, DIM, dtype, device)
    pool.slots.copy_(numbers(*pool.slots.shape))
    for _, past, blocks in cases:
        # Large values in slots that this step does not write reveal a read beyond a sequence's end.
        for position in range(past, len(blocks) * SIZE):
            pool.slots[:, :, blocks[position // SIZE] * SIZE + position % SIZE] = 100.0
    step = plan_step(pool, segments_of(cases), in_place=in_place)
    assert list(step.order) == sorted(range(len(cases)), key=lambda i: (cases[i][0] > 1, i))
    total = step.input_ids.shape[1]
    assert total == len(step.slots) + (-len(step.slots) % 16 if len(step.slots) > 64 else 0), "padding"
    query, key, value = (numbers(1, heads, total, DIM) for heads in (KV_HEADS * group, KV_HEADS, KV_HEADS))
    module = SimpleNamespace(layer_idx=0)
    got, _ = paged_attention(module, query, key, value, None, paged=step, scaling=0.3)  # type: ignore[arg-type]
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    logit_rows, row = [], 0
    for i in step.order:
        new, past, blocks = cases[i]
        rows = slice(row, row + new)
        slots = (torch.tensor(blocks)[:, None] * SIZE + torch.arange(SIZE)).flatten()[: past + new].to(device)
        keys, values = pool.keys[0][slots], pool.values[0][slots]
        assert torch.equal(keys[past:], key[0, :, rows].transpose(0, 1))
        assert torch.equal(values[past:], value[0, :, rows].transpose(0, 1))
        expected = formula(query[0, :, rows], keys, values, 0.3)
        torch.testing.assert_close(got[0, rows].float(), expected, atol=tolerance, rtol=tolerance)
        row += new
        logit_rows += [row - 1] * (i % 2)
        if past <= SIZE * (len(blocks) - 1):
            rest = slice(SIZE * blocks[-1] + (past + new - 1) % SIZE + 1, SIZE * blocks[-1] + SIZE)
            assert not pool.slots[:, :, rest].any(), "the rest of a partial block is zeroed"
    assert step.logit_rows.tolist() == logit_rows


def formula(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Return causal attention of the last rows, in float32: [n, heads, d] of [heads, n, d] over [S, kv_heads, d]."""
    group = query.shape[0] // key.shape[1]
    key, value = (heads.float().repeat_interleave(group, dim=1).transpose(0, 1) for heads in (key, value))
    scores = torch.matmul(query.float(), key.transpose(1, 2)) * scale
    future = torch.ones(scores.shape[1:], dtype=torch.bool, device=query.device)
    future = future.triu_(1 + scores.shape[2] - scores.shape[1])
    return torch.matmul(torch.softmax(scores.masked_fill_(future, float("-inf")), dim=-1), value).transpose(0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("in_place", [True, False])
@given(cases=steps(), group=st.sampled_from([1, 3]), long_run=st.sampled_from([1, 8, 256]), cut=st.booleans())
@settings(max_examples=60)
def test_a_step_attends_by_the_formula(
    dtype: torch.dtype, in_place: bool, cases: list[Case], group: int, long_run: int, cut: bool
) -> None:
    """KV is read in place, copied, or split if a copy would be too large."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reads, "LONG_RUN_TOKENS", long_run)
        if cut:
            patch.setattr(reads, "SMALL_TABLE_BLOCKS", 1)
            patch.setattr(reads, "GATHER_TOKENS", 24)
        check(cases, group, dtype, in_place=in_place)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gpu_attends_by_the_formula(dtype: torch.dtype, device: torch.device) -> None:
    cases = [(1, 40, [*range(11)]), (1, 9, [20, 18, 19]), (70, 0, [*range(30, 48)]), (9, 40, [*range(10), 60, 50, 58])]
    check(cases, 3, dtype, in_place=device.type == "cpu", device=device)


def test_a_common_prefix_is_read_once() -> None:
    """The rest is copied, with one copy per length. docs: decisions"""
    end = 10 + reads.LONG_RUN_TOKENS // SIZE
    shared, past = [*range(10, end)], reads.LONG_RUN_TOKENS
    cases = [(1, past, [*shared, end + 10]), (1, past + 6, [*shared, end, end + 11]), (1, 4, [end + 30, end + 31])]
    pool = KvPool(1, end + 44, SIZE, KV_HEADS, DIM, torch.float32, torch.device("cpu"))
    in_place, copied = plan_step(pool, segments_of(cases), in_place=True).reads
    assert (in_place.place, in_place.rows) == (slice(40, 40 + past), slice(0, 2))
    assert copied.rows == slice(0, 3)
    assert sorted(copied.place.tolist()) == [end + each for each in (0, 10, 10, 11, 30, 31)]  # type: ignore[union-attr]


def test_requests_get_the_same_tokens_over_copies(
    make_engine: MakeEngine, reference: Reference, device: torch.device
) -> None:
    """Cold, cached, forked and long prompts run at once, as on a GPU."""
    engine = make_engine(device=str(device))
    engine.runner.reads_in_place = False  # type: ignore[attr-defined]
    run_all(engine, [request("cold", prompt(100), 1)])
    prompts = {"warm": prompt(100), "fork": np.concatenate([prompt(100)[:70], prompt(30, 5)]), "long": prompt(400, 3)}
    got = run_all(engine, [request(name, ids, 12) for name, ids in prompts.items()])
    for name, ids in prompts.items():
        assert got.tokens[name] == reference("qwen3", ids, 12), name
    assert got.cached["warm"] == 96


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (MistralConfig(sliding_window=4096), "sliding_window"),
        (SimpleNamespace(model_type="g", layer_types=None, attn_logit_softcapping=50.0), "soft-capped"),
        (GptOssConfig(num_hidden_layers=2), "sliding"),
        (LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "rope_type=dynamic"),
    ],
)
def test_models_this_engine_would_get_wrong_are_refused(config: object, words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        refuse_unsupported(config)


def test_sinks_are_refused_by_their_parameters_and_plain_models_pass() -> None:
    model = torch.nn.Module()
    model.register_parameter("sinks", torch.nn.Parameter(torch.zeros(2)))
    with pytest.raises(UnsupportedModel, match="sinks"):
        refuse_unsupported(LlamaConfig(), model)
    for config in (LlamaConfig(), Qwen3Config(), MistralConfig(sliding_window=None)):
        refuse_unsupported(config)
