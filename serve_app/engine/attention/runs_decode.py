"""How the single-token rows of a step attend on a CPU: to long runs in place, to scattered blocks by a copy.

Partial results are merged through their log-sum-exp. What is read how was planned once for all layers.
"""

from __future__ import annotations

import torch

from serve_app.engine.attention.paging import PagedStep
from serve_app.engine.attention.partial_attention import partial_attention
from serve_app.engine.attention.runs_plan import DecodePart, GatherJob, LoneRuns

FOLDED_ROWS = 8
"""From this many query rows over one run, packing it head by head costs less than spreading the queries."""


def attend_decodes(paged: PagedStep, part: DecodePart, layer: int, rows: torch.Tensor, scale: float) -> torch.Tensor:
    """Attend single-token ``rows`` [n, kv_heads, group, head_dim]; same shape back."""
    count, kv_heads, group, head_dim = rows.shape
    if not part.views and part.lone is None and len(part.gathers) == 1:
        return _gathered(paged, part.gathers[0], layer, rows, scale)[0]
    outs = torch.zeros(part.partials * count, kv_heads, group, head_dim, dtype=torch.float32)
    lses = torch.full((part.partials * count, kv_heads, group), float("-inf"))
    for view in part.views:
        run = slice(view.piece.slot, view.piece.slot + view.piece.slots)
        keys, values = paged.pool.keys[layer][run], paged.pool.values[layer][run]
        viewed = rows[view.rows]
        attend = _folded if viewed.shape[0] * group >= FOLDED_ROWS else _streamed
        out, lses[view.target] = attend(paged, viewed, keys, values, scale)
        outs[view.target] = out.float()
    if part.lone is not None:
        out, lses[part.lone.target] = _lone(paged, part.lone, layer, rows[part.lone.rows], scale)
        outs[part.lone.target] = out.float()
    for gather in part.gathers:
        out, lses[gather.target] = _gathered(paged, gather, layer, rows[gather.rows], scale)
        outs[gather.target] = out.float()
    if part.partials == 1:
        return outs.to(rows.dtype)
    weights = torch.softmax(lses.view(part.partials, count, kv_heads, group), dim=0)
    merged = (outs.view(part.partials, count, kv_heads, group, head_dim) * weights[..., None]).sum(0)
    return merged.to(rows.dtype)


def _attend_products(
    scores: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend ``query`` [n, width] to ``key`` and ``value`` [S, width] by plain products in ``scores`` [n, S].

    Returns [n, width] and the log-sum-exp [n], which is s - log p of the largest score s and its probability p.
    """
    torch.addmm(scores, query, key.t(), beta=0, alpha=scale, out=scores)
    largest = scores.amax(dim=-1).float()
    torch.softmax(scores, dim=-1, out=scores)
    return torch.mm(scores, value), largest - scores.amax(dim=-1).float().log()


def _streamed(
    paged: PagedStep, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """A few rows [n, kv_heads, group, head_dim] over one run, which is read from memory once, in order.

    All heads share one product: each query is spread over the width of all heads, zero outside its own. The waste
    in multiplications is cheaper than reading the run head by head in small strided pieces.
    """
    count, kv_heads, group, head_dim = rows.shape
    query = _spread(rows).flatten(0, 1)
    scores = paged.pool.scratch("scores", query.shape[0], keys.shape[0])
    out, lse = _attend_products(scores, query, keys.flatten(1), values.flatten(1), scale)
    return _own_parts(out.view(count, -1, kv_heads * head_dim), kv_heads), lse.view(count, kv_heads, group)


def _lone(
    paged: PagedStep, lone: LoneRuns, layer: int, rows: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [n, kv_heads, group, head_dim] over a run each: two products a run as in ``_streamed``, the rest at once."""
    count, kv_heads, group, head_dim = rows.shape
    query = _spread(rows)
    width = kv_heads * head_dim
    keys, values = paged.pool.keys[layer].flatten(1), paged.pool.values[layer].flatten(1)
    lengths = [slots for _, slots in lone.runs]
    scores = paged.pool.scratch("scores", count, kv_heads * group, max(lengths))
    out = paged.pool.scratch("out", count, kv_heads * group, width)
    if min(lengths) < max(lengths):
        scores.fill_(float("-inf"))
    pairs = [(slice(slot, slot + slots), scores[i, :, :slots]) for i, (slot, slots) in enumerate(lone.runs)]
    for one, (run, part) in zip(query.unbind(), pairs, strict=True):
        torch.addmm(part, one, keys[run].t(), beta=0, alpha=scale, out=part)
    largest = scores.amax(dim=-1).float()
    torch.softmax(scores, dim=-1, out=scores)
    for found, (run, part) in zip(out.unbind(), pairs, strict=True):
        torch.mm(part, values[run], out=found)
    lse = largest - scores.amax(dim=-1).float().log()
    return _own_parts(out, kv_heads), lse.view(count, kv_heads, group)


def _spread(rows: torch.Tensor) -> torch.Tensor:
    """Return rows [n, kv_heads, group, head_dim] as [n, heads, all key-value heads' width], zero outside their own."""
    count, kv_heads, _, head_dim = rows.shape
    own = torch.eye(kv_heads, dtype=rows.dtype)[:, None, :, None]
    return (rows[:, :, :, None, :] * own).view(count, -1, kv_heads * head_dim)


def _own_parts(out: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Return each head's own part of ``out`` [n, heads, all key-value heads' width]: [n, kv_heads, group, head_dim]."""
    count, heads, width = out.shape
    parts = out.view(count, kv_heads, heads // kv_heads, kv_heads, width // kv_heads)
    return parts.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)


def _folded(
    paged: PagedStep, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Many rows over one run, head by head: worth a packed copy of the run."""
    count, kv_heads, group, head_dim = rows.shape
    total = keys.shape[0]
    key = paged.pool.scratch("packed_k", kv_heads, total, head_dim).copy_(keys.transpose(0, 1))
    value = paged.pool.scratch("packed_v", kv_heads, total, head_dim).copy_(values.transpose(0, 1))
    query = rows.transpose(0, 1).reshape(kv_heads, count * group, head_dim)
    scores = paged.pool.scratch("scores", count * group, total)
    found = [_attend_products(scores, query[head], key[head], value[head], scale) for head in range(kv_heads)]
    out = torch.stack([one for one, _ in found]).view(kv_heads, count, group, head_dim)
    lse = torch.stack([one for _, one in found]).view(kv_heads, count, group)
    return out.transpose(0, 1), lse.transpose(0, 1)


def _gathered(
    paged: PagedStep, job: GatherJob, layer: int, rows: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    count, kv_heads, group, head_dim = rows.shape
    pool = paged.pool
    gathered = []
    for name, blocks in (("gather_k", pool.key_blocks[layer]), ("gather_v", pool.value_blocks[layer])):
        found = pool.scratch(name, len(job.blocks), blocks.shape[1])
        torch.index_select(blocks, 0, job.blocks, out=found)
        gathered.append(found.view(count, -1, kv_heads, head_dim).transpose(1, 2))
    mask = job.mask.expand(-1, kv_heads, group, -1)
    return partial_attention(rows, gathered[0], gathered[1], mask, scale)
