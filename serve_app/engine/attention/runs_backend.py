"""The attention backend that suits any CPU: decode rows and prefill chunks over runs of neighbouring blocks.

Partial results are merged through their log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from serve_app.engine.attention.paging import KvPool, PagedStep, write_kv
from serve_app.engine.attention.partial_attention import partial_attention
from serve_app.engine.attention.runs_decode import attend_decodes
from serve_app.engine.attention.runs_plan import PrefillPart, RunsPlan, plan_runs
from serve_app.engine.attention.step_layout import lay_out, singles_first, upload_step
from serve_app.engine.step import Segment


class RunsBackend:
    """The default: long runs of blocks are read in place, once for all sequences that share them."""

    name = "runs"

    def plan(self, pool: KvPool, segments: Sequence[Segment]) -> PagedStep:
        """Plan a step; see ``AttentionBackend``."""
        layout = lay_out(segments, singles_first(segments), pool.block_size, blank_rows=True)
        step, _ = upload_step(pool, layout, self)
        return replace(step, plan=plan_runs(pool, layout.segments))

    def attend(
        self, step: PagedStep, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Write ``key`` and ``value``, attend ``query``; see ``AttentionBackend``."""
        write_kv(step, layer, key, value)
        plan: RunsPlan = step.plan
        tokens, heads, head_dim = query.shape
        kv_heads = step.pool.keys[layer].shape[1]
        real = len(step.slots)
        rows = query.reshape(tokens, kv_heads, heads // kv_heads, head_dim)
        if plan.decode is not None and plan.decode.rows == tokens:
            return attend_decodes(step, plan.decode, layer, rows, scale).reshape(tokens, heads, head_dim)
        output = torch.empty(tokens, kv_heads, heads // kv_heads, head_dim, dtype=query.dtype)
        output[real:] = 0
        if plan.decode is not None:
            output[: plan.decode.rows] = attend_decodes(step, plan.decode, layer, rows[: plan.decode.rows], scale)
        for part in plan.prefills:
            _prefill(step, part, layer, rows, output, scale)
        return output.view(tokens, heads, head_dim)


RUNS = RunsBackend()


def _prefill(
    paged: PagedStep, part: PrefillPart, layer: int, rows: torch.Tensor, output: torch.Tensor, scale: float
) -> None:
    """Attend a chunk to its past, unmasked, and to itself; partial results are merged through their log-sum-exp.

    A mask over both would take the fused kernel twice as long. The past is read where it lies.
    """
    query = rows[part.first : part.last]
    count, kv_heads, group, head_dim = query.shape
    slots = paged.slots[part.first : part.last]
    key, value = (
        pool[layer].index_select(0, slots).transpose(0, 1)[None] for pool in (paged.pool.keys, paged.pool.values)
    )
    out = torch.empty(kv_heads, group, count, head_dim, dtype=query.dtype)
    lse = torch.empty(kv_heads, group, count)
    for member in range(group):
        found = partial_attention(query[:, :, member].transpose(0, 1)[None], key, value, None, scale, causal=True)
        out[:, member], lse[:, member] = found[0][0], found[1][0]
    if part.pieces:
        together = query.permute(1, 2, 0, 3).reshape(1, kv_heads, group * count, head_dim)
        for past_key, past_value in _past(paged, part, layer):
            found = partial_attention(together, past_key, past_value, None, scale)
            past_out, past_lse = found[0].view(out.shape), found[1].view(lse.shape)
            out = torch.lerp(out, past_out, torch.sigmoid(past_lse - lse).to(out.dtype)[..., None])
            lse = torch.logaddexp(lse, past_lse)
    output[part.first : part.last] = out.permute(2, 0, 1, 3)


def _past(paged: PagedStep, part: PrefillPart, layer: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return keys and values of what a chunk comes after, [1, kv_heads, S, head_dim] each: its runs, or one copy."""
    pool = paged.pool
    keys, values = pool.keys[layer], pool.values[layer]
    if part.blocks is not None:
        # Into memory that the next layer takes again.
        copies = []
        for name, blocks in (("past_k", pool.key_blocks[layer]), ("past_v", pool.value_blocks[layer])):
            copy = pool.scratch(name, len(part.blocks), blocks.shape[1])
            copies.append(torch.index_select(blocks, 0, part.blocks, out=copy).view(-1, *keys.shape[1:]))
        keys, values = copies
    key, value = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
    return [(key[:, :, first : first + count], value[:, :, first : first + count]) for first, count in part.pieces]
