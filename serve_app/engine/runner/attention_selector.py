"""Which attention backend serves on this device: the first that runs here and agrees with the formula.

The probe is a ragged step over scattered blocks, compared with the formula in float32. A backend that is missing,
raises, or returns wrong numbers is refused with the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from serve_app.engine.attention.flash_backends import fa3_through_torch, restore_torch_flash, varlen_through_torch
from serve_app.engine.attention.gather_backends import SdpaBackend
from serve_app.engine.attention.paging import AttentionBackend, Heads, KvPool
from serve_app.engine.attention.runs_backend import RUNS
from serve_app.engine.cpu.amx.attention import amx_backend
from serve_app.engine.step import Segment, block_runs, ceil_div

_log = logging.getLogger(__name__)

_REASON_LENGTH = 160

Case = tuple[int, int, list[int]]
"""(new tokens, tokens before them, blocks) of one sequence."""


class NoBackend(RuntimeError):
    """No attention backend works here; the message says why each was refused."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend to try: ``make`` may raise; ``undo`` is called when it is refused. ``cpu_only``: it takes addresses."""

    name: str
    make: Callable[[Heads], AttentionBackend]
    undo: Callable[[], None] = lambda: None
    cpu_only: bool = False


CANDIDATES = (
    Candidate("fa3_torch", lambda _: fa3_through_torch(), restore_torch_flash),
    Candidate("varlen_torch", lambda _: varlen_through_torch()),
    Candidate("sdpa", lambda _: SdpaBackend()),
    Candidate("amx", lambda heads: amx_backend(heads), cpu_only=True),
    Candidate("runs", lambda _: RUNS),
)
"""One that follows block tables, one that copies KV for a fused kernel, torch's own, and the two made for CPUs."""

CPU_NAMES = frozenset({"amx", "runs"})
"""What "auto" tries on a CPU."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend that was taken, and (name, reason) of those refused before it."""

    backend: AttentionBackend
    refused: tuple[tuple[str, str], ...] = ()


def choose_backend(
    name: str, device: torch.device, heads: Heads, candidates: Sequence[Candidate] = CANDIDATES
) -> Choice:
    """Return the first of ``candidates`` that passes the probe; with a ``name`` other than "auto" only that one.

    On a CPU "auto" tries those made for one alone. Raises ValueError on an unknown name, NoBackend when none is left.
    """
    tried = [candidate for candidate in candidates if name in ("auto", candidate.name)]
    if name == "auto" and device.type == "cpu":
        tried = [candidate for candidate in tried if candidate.name in CPU_NAMES]
    if not tried:
        names = ", ".join(candidate.name for candidate in candidates)
        raise ValueError(f"attention_backend must be auto or one of {names}, not {name!r}")
    return probe(tried, device, heads)


def probe(candidates: Sequence[Candidate], device: torch.device, heads: Heads) -> Choice:
    """Return the first of ``candidates`` that works on ``device``. Raises NoBackend when none does."""
    refused: list[tuple[str, str]] = []
    for candidate in candidates:
        if candidate.cpu_only and device.type != "cpu":
            refused.append((candidate.name, "it is for CPUs"))
            continue
        try:
            backend = candidate.make(heads)
            reason = fault(backend, device, heads)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".strip().splitlines()[0][:_REASON_LENGTH]
        if not reason:
            _log.info("attention backend %s; refused: %s", candidate.name, _sentence(refused) or "none")
            return Choice(backend, tuple(refused))
        refused.append((candidate.name, reason))
        candidate.undo()
    raise NoBackend(f"no attention backend works on {device}: {_sentence(refused)}")


@torch.inference_mode()
def fault(backend: AttentionBackend, device: torch.device, heads: Heads, cases: Sequence[Case] = ()) -> str:
    """Run one ragged step; return "" when it agrees with the formula, else what is wrong. May raise what it raises."""
    generator = torch.Generator().manual_seed(1)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(heads.dtype)

    size, cases = heads.block_size, cases or ragged_cases(heads.block_size)
    pool = KvPool(1, max(b for *_, blocks in cases for b in blocks) + 2, size, heads.kv, heads.dim, heads.dtype, device)
    # Large where nobody has written: who reads beyond a sequence's end is found out.
    pool.tensor.fill_(100.0)
    segments = [
        Segment(np.zeros(new, dtype=np.int32), past, blocks, block_runs(blocks), None) for new, past, blocks in cases
    ]
    keys, values, queries = [], [], []
    for new, past, blocks in cases:
        key, value = numbers(past + new, heads.kv, heads.dim), numbers(past + new, heads.kv, heads.dim)
        slots = torch.tensor([block * size + i for block in blocks for i in range(size)])[: past + new].to(device)
        keys.append(key)
        values.append(value)
        queries.append(numbers(new, heads.query, heads.dim))
        pool.keys[0].index_copy_(0, slots[:past], key[:past].to(device))
        pool.values[0].index_copy_(0, slots[:past], value[:past].to(device))
    step = backend.plan(pool, segments)
    padding = torch.zeros(step.input_ids.shape[1], heads.query, heads.dim, dtype=heads.dtype)

    def packed(parts: list[torch.Tensor]) -> torch.Tensor:
        rows = torch.cat([parts[i] for i in step.order])
        return torch.cat([rows, padding[len(rows) :, : rows.shape[1]]]).to(device)

    fresh = [[part[past:] for part, (_, past, _) in zip(parts, cases, strict=True)] for parts in (keys, values)]
    scale = heads.dim**-0.5
    found = backend.attend(step, 0, packed(queries), packed(fresh[0]), packed(fresh[1]), scale).float().cpu()
    expected = torch.cat([formula(queries[i], keys[i], values[i], scale) for i in step.order])
    worst = (found[: len(expected)] - expected).abs().max().item()
    tolerance = 1e-3 if heads.dtype == torch.float32 else 3e-2
    return "" if worst <= tolerance else f"off by {worst:.3g} from the formula, more than {tolerance:g}"


def formula(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Return causal attention of the last rows, in float32: [n, heads, d] over [S, kv_heads, d]."""
    group = query.shape[1] // key.shape[1]
    key, value = (heads.float().repeat_interleave(group, dim=1).transpose(0, 1) for heads in (key, value))
    scores = torch.matmul(query.float().transpose(0, 1), key.transpose(1, 2)) * scale
    future = torch.ones(scores.shape[1:], dtype=torch.bool).triu_(1 + scores.shape[2] - scores.shape[1])
    return torch.matmul(torch.softmax(scores.masked_fill_(future, float("-inf")), dim=-1), value).transpose(0, 1)


def ragged_cases(size: int) -> list[Case]:
    """Return decodes at a block's start, inside one and at its end, and chunks with and without a past."""
    decodes = [(1, 0), (1, 3 * size), (1, 5 * size + size // 2), (1, 2 * size - 1)]
    shapes = [*decodes, (3 * size + 1, 0), (size + 3, 2 * size)]
    needed = [ceil_div(new + past, size) for new, past in shapes]
    scattered = np.random.default_rng(2).permutation(sum(needed) + 3).tolist()
    return [
        (new, past, [scattered.pop() for _ in range(count)]) for (new, past), count in zip(shapes, needed, strict=True)
    ]


def _sentence(refused: Sequence[tuple[str, str]]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in refused)
