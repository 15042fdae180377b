"""Attention backends against the formula, the plan they follow, and which of them a device gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.engine.attention import sdpa_backend
from serve_app.engine.attention.paging import AttentionBackend, KvPool, PagedStep
from serve_app.engine.attention.runs_backend import RUNS
from serve_app.engine.attention.sdpa_backend import SDPA, SdpaBackend
from serve_app.engine.attention.upload import packed_upload
from serve_app.engine.protocol import SamplingParams
from serve_app.engine.runner.model_runner import choose_backend
from serve_app.engine.step import Segment, block_runs
from tests.serve_app.conftest import MakeEngine, Reference
from tests.serve_app.engine.attention.formula import Case, Heads, fault
from tests.serve_app.engine.tiny import prompt, request, run_all

HEADS = Heads(query=6, kv=2, dim=16, block_size=4, dtype=torch.float32)


BACKENDS = [RUNS, SDPA]


@st.composite
def ragged(draw: st.DrawFn) -> list[Case]:
    """Steps of several sequences over distinct scattered blocks of four."""
    shapes = draw(
        st.lists(
            st.tuples(st.one_of(st.just(1), st.integers(1, 30)), st.one_of(st.just(0), st.integers(0, 90))),
            min_size=1,
            max_size=6,
        )
    )
    needed = [-(-(new + past) // 4) for new, past in shapes]
    blocks = draw(st.permutations(range(sum(needed))))
    cases = []
    for (new, past), count in zip(shapes, needed, strict=True):
        cases.append((new, past, blocks[:count]))
        blocks = blocks[count:]
    return cases


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@given(cases=ragged(), heads=st.sampled_from([HEADS, replace(HEADS, query=2), replace(HEADS, dtype=torch.bfloat16)]))
@settings(max_examples=40)
def test_every_backend_computes_the_formula(backend: AttentionBackend, cases: list[Case], heads: Heads) -> None:
    assert fault(backend, torch.device("cpu"), heads, cases) == ""


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("size", [1, 3, 16])
def test_every_backend_takes_blocks_of_any_size(backend: AttentionBackend, size: int, device: torch.device) -> None:
    device = torch.device("cpu") if backend is RUNS else device
    assert fault(backend, device, replace(HEADS, block_size=size)) == ""


def test_copies_are_cut_where_they_would_be_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of sequences, and masks of a chunk's rows, in bounded pieces that give the same result."""
    monkeypatch.setattr(sdpa_backend, "GATHER_TOKENS", 24)
    monkeypatch.setattr(sdpa_backend, "MASK_ENTRIES", 40)
    assert fault(SDPA, torch.device("cpu"), HEADS, [(40, 30, list(range(18, 0, -1)))]) == ""
    assert fault(SDPA, torch.device("cpu"), HEADS) == ""


@given(cases=ragged(), wanted=st.sets(st.integers(0, 5)), paged=st.booleans())
@settings(max_examples=120)
def test_a_step_is_what_the_segments_say(cases: list[Case], wanted: set[int], paged: bool) -> None:
    """Order, ids, positions, slots, padding, zeroed slots and block tables against the plain loops."""
    pool = KvPool(2, 1 + max(b for *_, bs in cases for b in bs), 4, 1, 2, torch.float32, torch.device("cpu"))
    pool.tensor.fill_(7)
    cleaned = pool.tensor.clone()
    sampling = [SamplingParams(1) if i in wanted else None for i in range(len(cases))]
    segments = [
        Segment(np.arange(i, i + new, dtype=np.int32), past, blocks, block_runs(blocks), sampling[i])
        for i, (new, past, blocks) in enumerate(cases)
    ]
    step = (SDPA if paged else RUNS).plan(pool, segments)
    assert sorted(step.order) == list(range(len(cases)))
    single = [len(segments[i].token_ids) == 1 for i in step.order]
    assert single == sorted(single, reverse=True)
    placed = [(len(segments[i].token_ids) > 1, segments[i].end if paged else i) for i in step.order]
    assert placed == sorted(placed), "shorter contexts first where blocks are paged, else as they came"
    logit_rows, row = [], 0
    for i in step.order:
        new, past, blocks = cases[i]
        rows = slice(row, row + new)
        where = range(past, past + new)
        assert step.input_ids[0, rows].tolist() == list(range(i, i + new))
        assert step.position_ids[0, rows].tolist() == list(where)
        assert step.slots[rows].tolist() == [4 * blocks[position // 4] + position % 4 for position in where]
        for position in range(past + new, 4 * len(blocks)):
            if past <= position // 4 * 4:
                cleaned[:, :, blocks[position // 4], position % 4] = 0
        logit_rows += [row + new - 1] * (i in wanted)
        row += new
    assert torch.equal(pool.tensor, cleaned)
    assert step.logit_rows.tolist() == logit_rows
    assert len(step.slots) == row
    padding = 0 if paged or row <= 64 else -row % 16
    assert step.input_ids.shape == step.position_ids.shape == (1, row + padding)
    assert not step.input_ids[0, row:].any()
    assert not step.position_ids[0, row:].any()


@given(
    st.lists(
        st.tuples(st.sampled_from([np.int32, np.int64, np.float64]), st.lists(st.integers(-9, 9), max_size=7)),
        min_size=1,
    )
)
def test_one_copy_carries_arrays_of_every_kind(given_arrays: list[tuple[Any, list[int]]]) -> None:
    arrays = [np.array(values, dtype=kind).reshape(1, -1) for kind, values in given_arrays]
    found = packed_upload(arrays, torch.device("cpu"), pin_memory=False)
    for tensor, array in zip(found, arrays, strict=True):
        assert torch.equal(tensor, torch.from_numpy(array))


class _Spoiled(SdpaBackend):
    """Right but for one thing: where a chunk's row looks, or the scale."""

    def __init__(self, how: str) -> None:
        self.name = how

    def plan(self, pool: KvPool, segments: Sequence[Segment]) -> PagedStep:
        step = super().plan(pool, segments)
        if self.name == "beyond the end":
            jobs = [replace(job, mask=torch.zeros_like(job.mask)) if hasattr(job, "mask") else job for job in step.plan]
            return replace(step, plan=jobs)
        return step

    def attend(
        self, step: PagedStep, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        if self.name == "not a number":
            return torch.full_like(query, float("nan"))
        return super().attend(step, layer, query, key, value, scale * 2 if self.name == "scale" else scale)


@pytest.mark.parametrize("how", ["beyond the end", "scale", "not a number"])
def test_the_comparison_can_fail(how: str) -> None:
    assert "off by" in fault(_Spoiled(how), torch.device("cpu"), HEADS)


def test_a_device_has_its_backend_and_a_setting_names_another() -> None:
    """docs/kernels.md"""
    cpu = torch.device("cpu")
    assert choose_backend("auto", cpu) is RUNS
    assert choose_backend("auto", torch.device("cuda")) is SDPA
    assert choose_backend("sdpa", cpu) is SDPA
    with pytest.raises(ValueError, match="attention_backend must be auto or one of runs, sdpa, not 'fa3_torch'"):
        choose_backend("fa3_torch", cpu)
    with pytest.raises(ValueError, match="attention_backend=runs is for CPUs: leave it out, or set sdpa, on cuda"):
        choose_backend("runs", torch.device("cuda"))


def test_requests_get_the_same_tokens_over_torchs_own_attention(
    make_engine: MakeEngine, reference: Reference, device: torch.device
) -> None:
    """Cold, cached, forked and long prompts at once; and the engine says which backend it uses."""
    engine = make_engine(attention_backend="sdpa", device=str(device))
    run_all(engine, [request("cold", prompt(100), 1)])
    prompts = {"warm": prompt(100), "fork": np.concatenate([prompt(100)[:70], prompt(30, 5)]), "long": prompt(400, 3)}
    got = run_all(engine, [request(name, ids, 12) for name, ids in prompts.items()])
    for name, ids in prompts.items():
        assert got.tokens[name] == reference("qwen3", ids, 12), name
    assert got.cached["warm"] == 96
    shown = {dict(labels)["backend"]: value for name, labels, value in engine.stats().samples
             if name == "warmpath_attention_backend"}  # fmt: skip
    assert shown == {"sdpa": 1.0}
