"""Attention to a part of the keys, with the log-sum-exp that merges it with the rest."""

from __future__ import annotations

import torch

PORTABLE_SCORES = 64 * 1024 * 1024
"""Scores held at once where there is no fused kernel: 256 MiB."""


def partial_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    *,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return softmax(QK)V and the log-sum-exp of its scores; [B, H, Q, D] and [B, H, Q] in float32.

    ``causal``: query i sees keys 0 to i (and there is no mask).
    """
    if query.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
            query, key, value, is_causal=causal, attn_mask=mask, scale=scale
        )
        return out, lse.float()
    return portable_attention(query, key, value, mask, scale, causal=causal)


def portable_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    *,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``partial_attention`` where there is no fused kernel that returns the log-sum-exp; in bounded memory."""
    batch, heads, rows, _ = query.shape
    out = torch.empty(query.shape, dtype=value.dtype, device=query.device)
    lse = torch.empty(batch, heads, rows, device=query.device)
    most = max(1, PORTABLE_SCORES // (batch * heads * key.shape[2]))
    for first in range(0, rows, most):
        here = slice(first, min(first + most, rows))
        scores = torch.matmul(query[:, :, here], key.transpose(-1, -2)).float() * scale
        if mask is not None:
            scores += mask if mask.shape[2] == 1 else mask[:, :, here]
        if causal:
            numbers = torch.arange(key.shape[2], device=query.device)
            scores.masked_fill_(numbers > numbers[here][:, None], float("-inf"))
        lse[:, :, here] = torch.logsumexp(scores, dim=-1)
        out[:, :, here] = torch.matmul(torch.exp(scores - lse[:, :, here, None]).to(value.dtype), value)
    return out, lse
