"""Attention of a packed ragged step over the paged KV pool, as a transformers attention function.

Several reads of a row are merged by their log-sum-exp. Sliding windows, soft-capping and sinks are refused.
"""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from serve_app.engine.attention.paging import KvPool, PagedStep, Read
from serve_app.engine.attention.supported import UnsupportedModel

IMPLEMENTATION = "paged_kv"


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: PagedStep | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Write ``key`` and ``value`` [1, kv_heads, T, head_dim], then attend ``query`` [1, heads, T, head_dim].

    Returns [1, T, heads, head_dim]. Mutates the pool's layer ``module.layer_idx`` at the step's slots. Rows after the
    real ones are padding, and are not written.
    """
    if sliding_window or softcap or s_aux is not None or position_bias is not None or attention_mask is not None:
        raise UnsupportedModel("sliding windows, soft-capping, sinks, biases and masks are not supported")
    assert paged is not None
    layer, real = int(module.layer_idx), len(paged.slots)  # type: ignore[arg-type]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (heads[0].transpose(0, 1) for heads in (query, key, value))
    paged.pool.write(layer, paged.slots, key[:real], value[:real])
    rows = query.reshape(len(query), key.shape[1], -1, query.shape[-1])
    merged = any(read.partial for read in paged.reads)
    output = torch.zeros(rows.shape, dtype=torch.float32 if merged else query.dtype, device=query.device)
    log_sums = torch.full(rows.shape[:3], float("-inf"), device=query.device)
    for read in paged.reads:
        keys, values = (_place(paged.pool, read, layer, plane, new) for plane, new in enumerate((key, value)))
        result, log_sum = (_attend_chunk if read.causal else _attend_rows)(read, rows[read.rows], keys, values, scale)
        if log_sum is None:
            output[read.rows] = result.to(output.dtype)
        else:
            before = log_sums[read.rows]
            share = torch.sigmoid(log_sum - before)[..., None]
            output[read.rows] = torch.lerp(output[read.rows], result.float(), share)
            log_sums[read.rows] = torch.logaddexp(before, log_sum)
    return output.to(query.dtype).flatten(1, 2)[None], None


AttentionInterface.register(IMPLEMENTATION, paged_attention)


def _place(pool: KvPool, read: Read, layer: int, plane: int, new: torch.Tensor) -> torch.Tensor:
    """Return the keys (plane 0) or values (1) of a read, [tables, tokens, kv_heads, head_dim]."""
    if read.place is None:
        return new[read.rows][None]
    if isinstance(read.place, slice):
        return pool.slots[layer, plane, read.place][None]
    tables = 1 if read.causal or read.mask is None else len(read.mask)
    copied = pool.copy(layer, plane, read.place)
    return copied.view(tables, -1, *copied.shape[2:])[:, : read.tokens]


def _attend_rows(
    read: Read, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend ``rows`` [n, kv_heads, group, head_dim] to one common table, or to a table each.

    The heads of a group, and the rows of one table, become rows of their key-value head's own query: nothing is
    repeated.
    """
    count, kv_heads, group, head_dim = rows.shape
    tables = len(keys)
    query = rows.reshape(tables, -1, kv_heads, group, head_dim).transpose(1, 2).flatten(2, 3)
    mask = None if read.mask is None else read.mask.expand(-1, kv_heads, query.shape[2], -1)
    result, log_sum = _attention(query, keys.transpose(1, 2), values.transpose(1, 2), mask, read, scale)
    shape = tables, kv_heads, count // tables, group
    result = result.reshape(*shape, head_dim).transpose(1, 2).reshape(rows.shape)
    if log_sum is not None:
        log_sum = log_sum.view(shape).transpose(1, 2).reshape(rows.shape[:3])
    return result, log_sum


def _attend_chunk(
    read: Read, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend ``rows`` [n, kv_heads, group, head_dim] of one chunk to the tokens that each of them sees."""
    keys, values = (place[0].transpose(0, 1)[:, None].expand(-1, rows.shape[2], -1, -1) for place in (keys, values))
    result, log_sum = _attention(rows.permute(1, 2, 0, 3), keys, values, read.mask, read, scale)
    return result.permute(2, 0, 1, 3), None if log_sum is None else log_sum.permute(2, 0, 1)


def _attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, read: Read, scale: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return softmax(QK)V [B, H, Q, D]; for a partial result also the log-sum-exp of its scores [B, H, Q]."""
    causal = read.causal and mask is None
    if not read.partial:
        result = scaled_dot_product_attention(query, keys, values, attn_mask=mask, is_causal=causal, scale=scale)
        return result, None
    result, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        query, keys, values, is_causal=causal, attn_mask=mask, scale=scale
    )
    return result, log_sum.float()
