"""The AMX kernel against the formula in float64, its plan against what the segments say, and where it is refused."""

from __future__ import annotations

import stat
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM

from serve_app.engine.attention.paging import Heads, KvPool
from serve_app.engine.attention.runs_backend import RUNS
from serve_app.engine.cpu.amx import jobs as amx_plan
from serve_app.engine.cpu.amx import library as amx_library
from serve_app.engine.cpu.amx.attention import AmxBackend, amx_backend
from serve_app.engine.cpu.amx.jobs import Sizes, plan_jobs
from serve_app.engine.cpu.amx.library import NoAmx, load_attention
from serve_app.engine.protocol import SamplingParams
from serve_app.engine.runner.attention_selector import choose_backend, fault
from serve_app.engine.runner.model_runner import ModelRunner
from serve_app.engine.settings import EngineSettings
from serve_app.engine.step import Segment, block_runs
from tests.serve_app.engine.tiny import SIZES, prompt

HEADS = Heads(query=4, kv=2, dim=64, block_size=16, dtype=torch.bfloat16)
CPU = torch.device("cpu")


def backend(heads: Heads = HEADS) -> AmxBackend:
    try:
        return amx_backend(heads)
    except NoAmx as why:
        pytest.skip(f"no AMX kernel here: {why}")


Case = tuple[int, int, list[int]]


@st.composite
def steps(draw: st.DrawFn) -> list[Case]:
    """Sequences of (new tokens, past, blocks) over blocks of 16, many of which begin with blocks of another one."""
    cases: list[Case] = []
    free = draw(st.permutations(range(160)))
    for _ in range(draw(st.integers(1, 7))):
        new = draw(st.one_of(st.just(1), st.just(1), st.integers(2, 90)))
        past = draw(st.one_of(st.just(0), st.integers(0, 300)))
        like = draw(st.integers(0, len(cases) - 1)) if cases and draw(st.booleans()) else None
        # What is shared are whole blocks that both have behind them.
        shared = [] if like is None else cases[like][2][: min(cases[like][1], past) // 16]
        shared = shared[: draw(st.integers(0, len(shared)))]
        own = -(-(new + past) // 16) - len(shared)
        cases.append((new, past, [*shared, *free[:own]]))
        free = free[own:]
    return cases


def wrong(tested: AmxBackend, heads: Heads, cases: Sequence[Case], spread: float = 1.0) -> float:
    """Return by how much a step over a random pool differs from the formula in float64; NaN where nobody wrote."""
    generator = torch.Generator().manual_seed(3)
    blocks = 1 + max(block for *_, table in cases for block in table)
    pool = KvPool(1, blocks, heads.block_size, heads.kv, heads.dim, heads.dtype, CPU)
    pool.tensor.fill_(float("nan"))
    tables = [
        (torch.tensor(b)[:, None] * heads.block_size + torch.arange(heads.block_size)).flatten() for *_, b in cases
    ]
    for (new, past, _), slots in zip(cases, tables, strict=True):
        for part in (pool.keys[0], pool.values[0]):
            part[slots[: new + past]] = (torch.randn(new + past, heads.kv, heads.dim, generator=generator) * spread).to(
                heads.dtype
            )
    segments = [Segment(np.zeros(new, dtype=np.int32), past, b, block_runs(b), None) for new, past, b in cases]
    step = tested.plan(pool, segments)
    # Laid out as a model's are: head by head, seen token by token. What is new is taken away from the pool first.
    query = torch.randn(heads.query, step.input_ids.shape[1], heads.dim, generator=generator).to(heads.dtype)
    query = query.transpose(0, 1)
    before = pool.tensor.clone()
    padding = step.input_ids.shape[1] - len(step.slots)
    fresh = [
        torch.cat([part[step.slots], torch.ones(padding, heads.kv, heads.dim, dtype=heads.dtype)]).transpose(0, 1)
        for part in (pool.keys[0], pool.values[0])
    ]
    for part in (pool.keys[0], pool.values[0]):
        part[step.slots] = float("nan")
    fresh = [part.contiguous().transpose(0, 1) for part in fresh]
    found = tested.attend(step, 0, query, *fresh, heads.dim**-0.5).double()
    assert torch.equal(pool.tensor.nan_to_num(7.0), before.nan_to_num(7.0))
    assert found.shape == query.shape
    assert not found[len(step.slots) :].any()
    worst, row, group = 0.0, 0, heads.query // heads.kv
    for i in step.order:
        new, past, _ = cases[i]
        slots = tables[i][: new + past]
        keys, values = (part[slots].double().repeat_interleave(group, 1) for part in (pool.keys[0], pool.values[0]))
        scores = torch.einsum("qhd,khd->hqk", query[row : row + new].double(), keys) * heads.dim**-0.5
        future = torch.arange(new + past)[None] > past + torch.arange(new)[:, None]
        weights = torch.softmax(scores.masked_fill(future, float("-inf")), -1)
        expected = torch.einsum("hqk,khd->qhd", weights, values)
        worst = max(worst, ((found[row : row + new] - expected).abs() / (spread + expected.abs())).max().item())
        row += new
    return worst


SHAPES = [
    HEADS,
    replace(HEADS, query=3, kv=3, dim=32),
    replace(HEADS, query=8, kv=1, dim=128, block_size=32),
    replace(HEADS, query=10, kv=2, dim=96),
    replace(HEADS, query=8, kv=2, dim=128),
    replace(HEADS, query=20, kv=20, dim=32),
]


@pytest.mark.parametrize("heads", SHAPES, ids=lambda heads: f"{heads.query}-{heads.kv}-{heads.dim}-{heads.block_size}")
@given(cases=steps(), split=st.sampled_from([16, 64, 512]), threads=st.sampled_from([1, 2, 16]))
@settings(max_examples=30)
def test_every_step_is_the_formula(heads: Heads, cases: list[Case], split: int, threads: int) -> None:
    tested = backend(heads)
    if heads.block_size != 16:
        cases = [(new, past, [block // 2 for block in table[::2]]) for new, past, table in cases[:1]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(amx_plan, "SPLIT_TOKENS", split)
        patch.setattr(torch, "get_num_threads", lambda: threads)
        assert wrong(tested, heads, cases) < 0.02


def test_long_chunks_and_long_pasts() -> None:
    """More rows than a job has lanes, more keys than are at hand at once, and hundreds of shared decodes."""
    shared = list(range(40))
    decodes: list[Case] = [(1, 640 + i % 15, [*shared, 50 + i]) for i in range(300)]
    assert wrong(backend(), HEADS, [(700, 0, list(range(44))), (600, 437, list(range(50, 115)))]) < 0.02
    assert wrong(backend(), HEADS, decodes) < 0.02


def test_scores_that_grow_by_far_are_measured_anew() -> None:
    """Keys whose scores exceed those before by hundreds: the weights before become nothing, and nothing overflows."""
    assert wrong(backend(), HEADS, [(3, 900, list(range(60, 0, -1))), (1, 500, list(range(70, 102)))], 20.0) < 0.02


@pytest.mark.parametrize("new", [1, 40], ids=["few queries", "many queries"])
def test_the_first_of_many_keys_count_as_much_as_the_last(new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal scores, values of 1 in the first half and of -1 in the second: nothing remains, however many there are."""
    tested = backend()
    monkeypatch.setattr(amx_plan, "SPLIT_TOKENS", 1 << 30)
    past, blocks = 40_000 - new, list(range(2500))
    pool = KvPool(1, 2500, 16, HEADS.kv, HEADS.dim, HEADS.dtype, CPU)
    pool.values[0][:20_000] = 1
    pool.values[0][20_000:] = -1
    step = tested.plan(pool, [Segment(np.zeros(new, dtype=np.int32), past, blocks, block_runs(blocks), None)])
    rows = step.input_ids.shape[1]
    query = torch.ones(rows, HEADS.query, HEADS.dim, dtype=HEADS.dtype)
    fresh = torch.zeros(rows, HEADS.kv, HEADS.dim, dtype=HEADS.dtype)
    found = tested.attend(step, 0, query, fresh, fresh - 1, 1.0)
    assert found[:new].abs().max() < 0.003


def test_numbers_that_are_none_stay_with_their_sequence() -> None:
    tested = backend()
    pool = KvPool(1, 8, 16, HEADS.kv, HEADS.dim, HEADS.dtype, CPU)
    pool.tensor[:, :, 4:].fill_(float("nan"))
    segments = [
        Segment(np.zeros(new, dtype=np.int32), past, blocks, block_runs(blocks), None)
        for new, past, blocks in ((1, 40, [0, 1, 2]), (1, 20, [4, 5]), (20, 0, [6, 7]))
    ]
    step = tested.plan(pool, segments)
    query = torch.ones(step.input_ids.shape[1], HEADS.query, HEADS.dim, dtype=HEADS.dtype)
    fresh = torch.ones(step.input_ids.shape[1], HEADS.kv, HEADS.dim, dtype=HEADS.dtype)
    fresh[2] = float("nan")
    found = tested.attend(step, 0, query, fresh, fresh, 1.0)
    assert not found[0].isnan().any()
    assert found[1:22].isnan().all()


def test_rows_of_another_kind_are_refused() -> None:
    tested = backend()
    pool = KvPool(1, 2, 16, HEADS.kv, HEADS.dim, HEADS.dtype, CPU)
    step = tested.plan(pool, [Segment(np.zeros(1, dtype=np.int32), 0, [0], [(0, 1)], None)])
    query, fresh = torch.ones(1, HEADS.query, HEADS.dim), torch.ones(1, HEADS.kv, HEADS.dim).bfloat16()
    with pytest.raises(TypeError, match=r"takes bfloat16, not torch\.float32"):
        tested.attend(step, 0, query, fresh, fresh, 1.0)


@given(cases=steps(), threads=st.sampled_from([1, 2, 16]))
@settings(max_examples=60)
def test_a_plan_gives_every_row_its_keys_once(cases: list[Case], threads: int) -> None:
    """The (position, block) pairs of a row's jobs are those of its sequence, none twice, none beyond its own."""
    cases = sorted(cases, key=lambda case: case[0] > 1)
    segments = [Segment(np.zeros(new, dtype=np.int32), past, b, block_runs(b), None) for new, past, b in cases]
    sizes = Sizes(block=16, lanes=64, few=4, kv_heads=2, group=2, threads=threads)
    words = plan_jobs(segments, 1000, sizes).words.tolist()
    jobs, many, merges, padded, rows, jobs_at, tables_at, rows_at, places_at, merges_at = words[:10]
    assert (padded, rows) == (1000, sum(new for new, *_ in cases))
    seen: dict[int, Counter[tuple[int, int]]] = {row: Counter() for row in range(rows)}
    places: dict[int, list[int]] = {row: [] for row in range(rows)}
    for k in range(jobs):
        table, keys, first_key, at, count = words[jobs_at + 5 * k : jobs_at + 5 * k + 5]
        assert count * 2 <= 64
        assert (count * 2 <= 4) == (k >= many)
        assert first_key % 16 == 0
        for row, place in zip(words[rows_at + at :][:count], words[places_at + at :][:count], strict=True):
            seen[row].update((first_key + j, words[tables_at + table + j // 16]) for j in range(keys))
            places[row].append(place)
    row = 0
    for new, past, blocks in cases:
        for position in range(past, past + new):
            known = {key: n for key, n in seen[row].items() if key[0] <= position}
            assert known == {(j, blocks[j // 16]): 1 for j in range(position + 1)}
            # Rows of a chunk share a job that ends with its last one; the kernel hides what comes after a row.
            assert all(j < past + new for j, _ in seen[row])
            row += 1
    merged = {words[merges_at + 3 * k]: words[merges_at + 3 * k + 1 :][:2] for k in range(merges)}
    for row, used in places.items():
        first, count = merged.get(row, (-1, 1))
        assert sorted(used) == list(range(first, first + count))
    taken = [place for used in places.values() for place in used if place >= 0]
    assert len(taken) == len(set(taken))


def test_a_common_beginning_is_read_once() -> None:
    shared = list(range(30))
    segments = [
        Segment(np.zeros(1, dtype=np.int32), 490, [*shared, 40 + i], [(0, 30), (40 + i, 1)], None) for i in range(8)
    ]
    words = plan_jobs(segments, 8, Sizes(16, 512, 4, 4, 2, 2)).words.tolist()
    described = [words[words[5] + 5 * k :][:5] for k in range(words[0])]
    assert [(keys, rows) for _, keys, _, _, rows in described] == [(480, 8)] + [(11, 1)] * 8


def test_sizes_and_machines_that_do_not_suit_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(amx_library.SWITCH, raising=False)
    with pytest.raises(NoAmx, match="bfloat16, not float32"):
        amx_backend(replace(HEADS, dtype=torch.float32))
    with pytest.raises(NoAmx, match="head_dim 16 must be a multiple of 32 and block_size 16 one of 16"):
        load_attention(16, 16)
    monkeypatch.setattr(amx_library, "_cpu_flags", lambda: amx_library._NEEDED - {"amx_bf16"})
    with pytest.raises(NoAmx, match="this CPU lacks amx_bf16"):
        load_attention(64, 16)
    assert choose_backend("auto", CPU, HEADS).backend is RUNS
    monkeypatch.setattr(amx_library, "_cpu_flags", lambda: amx_library._NEEDED)
    monkeypatch.setattr(amx_library.shutil, "which", lambda name: None)
    with pytest.raises(NoAmx, match="no C compiler"):
        load_attention(64, 16)
    monkeypatch.setenv(amx_library.SWITCH, "0")
    with pytest.raises(NoAmx, match="WARMPATH_AMX=0 switches the kernels off"):
        load_attention(64, 16)
    monkeypatch.delenv(amx_library.SWITCH)
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'fatal error: immintrin.h: No such file' >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(amx_library.shutil, "which", lambda name: str(broken))
    monkeypatch.setattr(amx_library, "COMPILED", tmp_path / "built")
    with pytest.raises(NoAmx, match=r"failed: fatal error: immintrin.h"):
        load_attention(64, 16)
    assert list((tmp_path / "built").iterdir()) == []


def test_what_is_loaded_is_built_once_and_private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    backend()
    monkeypatch.setattr(amx_library, "COMPILED", tmp_path / "built")
    load_attention(64, 16)
    (built,) = (tmp_path / "built").iterdir()
    assert stat.S_IMODE(built.stat().st_mode) == stat.S_IMODE(built.parent.stat().st_mode) == 0o700
    monkeypatch.setattr(amx_library, "_build", lambda *_: pytest.fail("built twice"))
    load_attention(64, 32)
    built.parent.chmod(0o770)
    with pytest.raises(NoAmx, match="others may write it"):
        load_attention(64, 16)


def test_it_passes_the_probe_and_is_taken() -> None:
    assert fault(backend(), CPU, HEADS) == ""
    assert choose_backend("auto", CPU, HEADS).backend.name == "amx"


def test_a_model_over_it_computes_what_it_does_over_pytorchs_operations(tmp_path: Path) -> None:
    """A chunk, its next part beside decodes and a shared beginning: logits near those of the other backend."""
    backend()
    torch.manual_seed(7)
    Qwen3ForCausalLM(Qwen3Config(head_dim=32, **SIZES)).save_pretrained(tmp_path)
    runners = [
        ModelRunner(tmp_path, EngineSettings(num_blocks=40, dtype="bfloat16", device="cpu", attention_backend=name))
        for name in ("amx", "runs")
    ]
    assert [runner.attention.backend.name for runner in runners] == ["amx", "runs"]
    sampling = SamplingParams(1)

    def segment(start: int, count: int, blocks: list[int]) -> Segment:
        return Segment(prompt(400)[start : start + count], start, blocks, block_runs(blocks), sampling)

    long, fork = list(range(20)), [*range(8), 30, 31]
    for step in ([segment(0, 200, long)], [segment(200, 70, long), segment(128, 1, fork)],
                 [segment(270, 1, long), segment(129, 1, fork), segment(0, 5, [33])]):  # fmt: skip
        with torch.inference_mode():
            ours, plain = (runner._compute(step)[1] for runner in runners)
        assert ours.shape == plain.shape
        assert float((ours - plain).norm() / plain.norm()) < 0.03
