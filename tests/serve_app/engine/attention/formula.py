"""The formula of attention, and one ragged step of a backend compared with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from serve_app.engine.attention.paging import AttentionBackend, KvPool
from serve_app.engine.step import Segment, block_runs, ceil_div

Case = tuple[int, int, list[int]]
"""(new tokens, tokens before them, blocks) of one sequence."""


@dataclass(frozen=True, slots=True)
class Heads:
    """The sizes of one model and its pool."""

    query: int
    kv: int
    dim: int
    block_size: int
    dtype: torch.dtype


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
