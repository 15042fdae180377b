"""Recorded decode steps: static buffers and padding on every device, CUDA's own recordings where there is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from serve_app.engine.attention.gather_backends import SdpaBackend
from serve_app.engine.attention.page_table import PageTable, plan_pages
from serve_app.engine.attention.paging import KvPool, PagedStep, write_kv
from serve_app.engine.protocol import SamplingParams
from serve_app.engine.runner import cuda_graphs
from serve_app.engine.runner.attention_selector import Choice
from serve_app.engine.runner.cuda_graphs import DecodeGraphs, Record, Replay, cuda_recorder, padded_sizes
from serve_app.engine.runner.model_runner import ModelRunner
from serve_app.engine.settings import EngineSettings
from serve_app.engine.step import Segment, block_runs
from tests.serve_app.engine.tiny import prompt

BLOCKS, SIZE, MAX_TOKENS = 40, 4, 64


class FullWidth(SdpaBackend):
    """Reads sizes on the device alone, at the price of the table's whole width: what a recording needs."""

    name = "full_width"
    in_graphs = True

    def plan(self, pool: KvPool, segments: Sequence[Segment], rows: int = 0) -> PagedStep:
        return plan_pages(pool, segments, self, rows) if rows else super().plan(pool, segments)

    def attend(
        self, step: PagedStep, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        if not isinstance(step.plan, PageTable):
            return super().attend(step, layer, query, key, value, scale)
        write_kv(step, layer, key, value)
        table, size = step.plan.blocks, step.pool.block_size
        slots = (table.long()[:, :, None] * size + torch.arange(size, device=table.device)).flatten(1)
        group = query.shape[1] // step.pool.keys[layer].shape[1]
        keys, values = (kv[layer][slots].repeat_interleave(group, 2) for kv in (step.pool.keys, step.pool.values))
        scores = torch.einsum("nhd,nshd->nhs", query, keys) * scale
        hidden = torch.arange(slots.shape[1], device=table.device)[None] >= step.plan.lengths[:, None]
        weights = torch.softmax(scores.masked_fill(hidden[:, None], float("-inf")), -1)
        return torch.einsum("nhs,nshd->nhd", weights, values)


def run_again(work: Callable[[], None], device: torch.device) -> Replay:
    """A recorder for devices without graphs: the same work on the same static buffers."""
    work()
    return work


def recorder(device: torch.device) -> Record:
    return cuda_recorder() if device.type == "cuda" else run_again


def make_runner(
    path: Path, device: torch.device, record: Record | None, rows: int = 6, blocks: int = BLOCKS
) -> ModelRunner:
    settings = EngineSettings(
        num_blocks=blocks, block_size=SIZE, dtype="float32", device=str(device), enforce_eager=True,
        attention_backend="sdpa", max_model_len=MAX_TOKENS,
    )  # fmt: skip
    runner = ModelRunner(path, settings)
    if record is not None:
        old = runner.pool.tensor
        sizes = (old.shape[0], blocks, SIZE, old.shape[4], old.shape[5])
        runner.pool = KvPool(*sizes, torch.float32, device, scratch_block=True)
        runner.attention = Choice(FullWidth())
        runner._graphs = DecodeGraphs(
            runner.pool, FullWidth(), runner.forward, max_rows=rows, max_tokens=MAX_TOKENS, record=record
        )
    return runner


def decode(runner: ModelRunner, lengths: Sequence[int], steps: int) -> list[list[int]]:
    """Prefill prompts of ``lengths`` and decode them together, over scattered blocks."""
    scattered = np.random.default_rng(5).permutation(BLOCKS).tolist()
    blocks = [[scattered.pop() for _ in range(-(-(length + steps) // SIZE))] for length in lengths]
    tokens: list[list[int]] = [[] for _ in lengths]
    for step in range(steps):
        segments = []
        for i, length in enumerate(lengths):
            ids = prompt(length, i) if not step else np.array(tokens[i][-1:], dtype=np.int32)
            sampling = SamplingParams(1, temperature=float(i % 2), seed=i)
            start = length + step - 1 if step else 0
            segments.append(Segment(ids, start, blocks[i], block_runs(blocks[i]), sampling))
        for i, result in enumerate(runner.execute(segments)):
            assert result.token is not None
            tokens[i].append(result.token)
    return tokens


def test_padded_sizes_are_powers_of_two_and_the_most_there_can_be() -> None:
    assert [padded_sizes(most) for most in (1, 2, 6, 64)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8, 16, 32, 64]]


def test_recorded_steps_give_the_tokens_of_eager_ones(checkpoints: dict[str, Path], device: torch.device) -> None:
    """At every batch size up to the largest, and beyond it, where the step runs eagerly."""
    recorded = make_runner(checkpoints["qwen3"], device, recorder(device))
    assert recorded._graphs is not None
    assert recorded._graphs.sizes == (1, 2, 4, 6)
    assert not recorded.pool.tensor.any(), "the check left something behind"
    eager = make_runner(checkpoints["qwen3"], device, None)
    for lengths in ([5], [3, 17], [9, 1, 12], [4, 8, 2, 13, 6, 7], [3] * 8):
        assert decode(recorded, lengths, 9) == decode(eager, lengths, 9), lengths
    assert torch.equal(recorded.pool.tensor[:, :, :BLOCKS].any(), eager.pool.tensor.any())
    torch.testing.assert_close(recorded.pool.tensor[:, :, :BLOCKS], eager.pool.tensor, atol=1e-5, rtol=1e-4)


def test_padding_touches_nobodys_blocks(checkpoints: dict[str, Path], device: torch.device) -> None:
    """Three rows in a recording of four: only their own slots and the scratch block change. (docs/kernels.md)"""
    runner = make_runner(checkpoints["llama"], device, recorder(device))
    runner.pool.tensor.fill_(3.0)
    segments = [
        Segment(prompt(1, i), start, blocks, block_runs(blocks), SamplingParams(1, temperature=0.0))
        for i, (start, blocks) in enumerate([(2, [0]), (6, [7, 5]), (9, [1, 2, 3])])
    ]
    runner.execute(segments)
    changed = (runner.pool.tensor != 3.0).any(0).any(0).flatten(2).any(2)
    slots = [(block, slot) for block, slot in changed.nonzero().tolist() if block < BLOCKS]
    assert slots == [(0, 2), (3, 1), (5, 2)]


def test_a_recording_that_repeats_old_results_is_found_out(
    checkpoints: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """The check replays with other data: a replay that does nothing, or fails, leaves the engine eager.

    docs/kernels.md
    """

    def does_nothing(work: Callable[[], None], device: torch.device) -> Replay:
        work()
        return lambda: None

    def fails_above_two(work: Callable[[], None], device: torch.device) -> Replay:
        calls.append(1)
        if len(calls) > 2:
            raise RuntimeError("operation not permitted when stream is capturing")
        return run_again(work, device)

    runner = make_runner(checkpoints["qwen3"], torch.device("cpu"), does_nothing)
    assert runner._graphs is not None
    assert runner._graphs.sizes == ()
    assert "a replay of 1 rows is off by" in caplog.text
    calls: list[int] = []
    runner = make_runner(checkpoints["qwen3"], torch.device("cpu"), fails_above_two)
    assert runner._graphs is not None
    assert runner._graphs.sizes == (1, 2)
    assert "above 2 rows are not recorded: operation not permitted" in caplog.text
    eager = make_runner(checkpoints["qwen3"], torch.device("cpu"), None)
    assert decode(runner, [3, 9, 5], 6) == decode(eager, [3, 9, 5], 6)


def test_recordings_end_at_their_memory(checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter([0, 10, 3 * cuda_graphs.GRAPH_BYTES])
    monkeypatch.setattr(cuda_graphs, "_reserved_bytes", lambda device: next(taken))
    runner = make_runner(checkpoints["qwen3"], torch.device("cpu"), run_again)
    assert runner._graphs is not None
    assert runner._graphs.sizes == (1, 2)


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_a_pool_smaller_than_the_batch_is_recorded_as_far_as_it_goes(checkpoints: dict[str, Path], blocks: int) -> None:
    runner = make_runner(checkpoints["qwen3"], torch.device("cpu"), run_again, rows=8, blocks=blocks)
    assert runner._graphs is not None
    assert max(runner._graphs.sizes) == blocks


def test_backends_that_need_the_hosts_sizes_are_not_recorded(checkpoints: dict[str, Path]) -> None:
    runner = make_runner(checkpoints["qwen3"], torch.device("cpu"), None)
    pool = KvPool(2, 8, SIZE, 2, 16, torch.float32, torch.device("cpu"), scratch_block=True)
    graphs = DecodeGraphs(pool, SdpaBackend(), runner.forward, max_rows=4, max_tokens=32, record=run_again)
    assert graphs.sizes == ()
