"""Attention to a part of the keys, with the log-sum-exp that merges it with the rest."""

from __future__ import annotations

import torch


def partial_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    *,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return softmax(QK)V and the log-sum-exp of its scores, on a CPU; [B, H, Q, D] and [B, H, Q] in float32.

    ``causal``: query i sees keys 0 to i (and there is no mask).
    """
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        query, key, value, is_causal=causal, attn_mask=mask, scale=scale
    )
    return out, lse.float()
