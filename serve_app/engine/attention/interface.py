"""Attention of a packed ragged step over the paged KV pool, as a transformers attention function.

The step's own backend attends; where KV lies comes in the step's plan. What no backend computes (sliding windows,
soft-capping, sinks) is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from serve_app.engine.attention.paging import PagedStep
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

    Returns [1, T, heads, head_dim]. Mutates the pool's layer ``module.layer_idx`` at the step's slots.
    """
    if sliding_window or softcap or s_aux is not None or position_bias is not None or attention_mask is not None:
        raise UnsupportedModel("sliding windows, soft-capping, sinks, biases and masks are not supported")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    assert paged is not None
    query, key, value = (heads[0].transpose(0, 1) for heads in (query, key, value))
    return paged.backend.attend(paged, layer, query, key, value, scale)[None], None


AttentionInterface.register(IMPLEMENTATION, paged_attention)
