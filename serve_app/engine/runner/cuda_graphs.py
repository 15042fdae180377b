"""Decode steps recorded as CUDA graphs: one launch a step in place of hundreds.

A planned step is copied into static buffers; there is one recording for each of a few padded batch sizes. A replay
with other data is checked against an eager step. Prefill, adapters and larger batches run eagerly. A failure while
recording or in the check leaves the smaller sizes, or none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from serve_app.engine.attention.page_table import PageTable
from serve_app.engine.attention.paging import AttentionBackend, KvPool, PagedStep
from serve_app.engine.protocol import SamplingParams
from serve_app.engine.step import Segment, block_runs, ceil_div

_log = logging.getLogger(__name__)

GRAPH_BYTES = 1024**3
"""Device memory that recordings may take together; sizes beyond it run eagerly."""

MOST_ROWS = 256

_TOLERANCE = 0.02
"""Largest difference to the eager step, as a part of its largest logit: the kernels are the same."""

Forward = Callable[[PagedStep], torch.Tensor]
"""To float32 logits [step.logit_rows, vocab]."""

Replay = Callable[[], None]
Record = Callable[[Callable[[], None], torch.device], Replay]
"""Runs work on a device so that what is returned repeats it, on the same memory."""


@dataclass(frozen=True, slots=True)
class _Recording:
    """``logits``: one tensor, where a replay leaves its result."""

    replay: Replay
    logits: list[torch.Tensor]


class DecodeGraphs:
    """Recorded decode steps of one model over one pool, which must have a scratch block."""

    def __init__(
        self,
        pool: KvPool,
        backend: AttentionBackend,
        forward: Forward,
        *,
        max_rows: int,
        max_tokens: int,
        record: Record,
    ) -> None:
        """Record every size that works. Writes to the pool, which must be in nobody's use, and zeroes it again."""
        self._pool = pool
        self._backend = backend
        self._forward = forward
        self._max_tokens = max_tokens
        device = pool.tensor.device
        # Every row needs a block of its own in the check.
        most = min(max_rows, MOST_ROWS, pool.num_blocks)
        width = min(ceil_div(max_tokens, pool.block_size), pool.num_blocks)
        self._ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)
        self._slots = torch.zeros(most, dtype=torch.int64, device=device)
        self._lengths = torch.ones(most, dtype=torch.int32, device=device)
        self._blocks = torch.full((most, width), pool.num_blocks, dtype=torch.int32, device=device)
        self._cu_rows = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._numbers = torch.arange(most, device=device)
        self._recordings: dict[int, _Recording] = {}
        if backend.in_graphs:
            self._record_all(padded_sizes(most), record)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Batch sizes that are recorded, ascending."""
        return tuple(self._recordings)

    def run(self, segments: Sequence[Segment]) -> tuple[PagedStep, torch.Tensor] | None:
        """Compute a step of single tokens; returns its plan and logits [len(segments), vocab] in the plan's order.

        None when it has to run eagerly. The logits are overwritten by the next run.
        """
        size = next((size for size in self._recordings if size >= len(segments)), 0)
        if not size or any(len(segment.token_ids) > 1 or segment.lora for segment in segments):
            return None
        if any(segment.end > self._max_tokens for segment in segments):
            return None
        step = self._backend.plan(self._pool, segments, size)
        recording = self._recordings[size]
        self._load(step)
        recording.replay()
        return step, recording.logits[0][: len(segments)]

    def _load(self, step: PagedStep) -> None:
        """Copy a plan that is padded to a recorded size into the buffers that recordings read."""
        pages: PageTable = step.plan
        rows = step.input_ids.shape[1]
        self._ids[:rows].copy_(step.input_ids[0])
        self._positions[:rows].copy_(step.position_ids[0])
        self._slots[:rows].copy_(step.slots)
        self._lengths[:rows].copy_(pages.lengths)
        self._blocks[:rows, : pages.blocks.shape[1]].copy_(pages.blocks)

    def _view(self, rows: int) -> PagedStep:
        pages = PageTable(
            cu_rows=self._cu_rows[: rows + 1],
            lengths=self._lengths[:rows],
            blocks=self._blocks[:rows],
            rows=(1,) * rows,
            tokens=(self._max_tokens,) * rows,
            singles=rows,
            most_rows=1,
            most_tokens=self._max_tokens,
        )
        return PagedStep(
            pool=self._pool,
            backend=self._backend,
            order=tuple(range(rows)),
            input_ids=self._ids[:rows][None],
            position_ids=self._positions[:rows][None],
            slots=self._slots[:rows],
            logit_rows=self._numbers[:rows],
            plan=pages,
        )

    @torch.inference_mode()
    def _record_all(self, sizes: Sequence[int], record: Record) -> None:
        device = self._pool.tensor.device
        before = _reserved_bytes(device)
        self._pool.tensor.normal_()
        try:
            for size in sizes:
                self._record_one(size, record)
                taken = _reserved_bytes(device) - before
                if taken > GRAPH_BYTES:
                    _log.warning("decode graphs end at %d rows: they take %d MiB", size, taken >> 20)
                    break
        except Exception as error:
            # Whatever a recording does wrong, an eager step does right.
            _log.warning("decode steps above %d rows are not recorded: %s", max(self.sizes, default=0), error)
        finally:
            self._pool.tensor.zero_()

    def _record_one(self, rows: int, record: Record) -> None:
        """Record a step, then replay it with other data against an eager one. Raises RuntimeError on a difference."""
        view = self._view(rows)
        logits: list[torch.Tensor] = []

        def work() -> None:
            logits[:] = [self._forward(view)]

        self._load(self._dummy(rows, seed=rows))
        replay = record(work, self._pool.tensor.device)
        self._load(self._dummy(rows, seed=rows + 1))
        replay()
        replayed = logits[0].clone()
        eager = self._forward(view)
        worst, largest = (replayed - eager).abs().max().item(), eager.abs().max().item()
        if not worst <= _TOLERANCE * largest:
            raise RuntimeError(f"a replay of {rows} rows is off by {worst:.3g} where logits reach {largest:.3g}")
        self._recordings[rows] = _Recording(replay, logits)

    def _dummy(self, rows: int, seed: int) -> PagedStep:
        """Plan a step of random tokens at random places, the last row padding where there are several."""
        pool, generator = self._pool, np.random.default_rng(seed)
        real = max(1, rows - 1)
        free = generator.permutation(pool.num_blocks).tolist()
        own, shared = free[:real], free[real:]
        segments = []
        for block in own:
            past = shared[: int(generator.integers(0, min(len(shared), self._blocks.shape[1] - 1, 8) + 1))]
            start = len(past) * pool.block_size + int(generator.integers(0, pool.block_size))
            start = min(start, self._max_tokens - 1)
            blocks = [*past[: start // pool.block_size], block]
            token = generator.integers(0, 100, 1, dtype=np.int32)
            segments.append(Segment(token, start, blocks, block_runs(blocks), SamplingParams(1)))
        return self._backend.plan(pool, segments, rows)


def padded_sizes(most: int) -> list[int]:
    """Return the powers of two below ``most``, and it."""
    return [*(1 << i for i in range(most.bit_length()) if 1 << i < most), most]


def cuda_recorder() -> Record:
    """Return what records work as CUDA graphs that share their memory: their results last until the next replay."""
    memory = torch.cuda.graph_pool_handle()

    def record(work: Callable[[], None], device: torch.device) -> Replay:
        with torch.cuda.device(device):
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    work()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # Another thread, which loads adapters for example, may use the device meanwhile.
            with torch.cuda.graph(graph, pool=memory, stream=stream, capture_error_mode="thread_local"):
                work()

        def replay() -> None:
            with torch.cuda.device(device):
                graph.replay()

        return replay

    return record


def _reserved_bytes(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
