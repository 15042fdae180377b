"""Attention backends over the FlashAttention kernels behind ``torch.nn.attention.varlen``.

A kernel that is missing raises ImportError here; one that does not run on this device raises when the probe calls it.
Nothing is downloaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

import torch

from serve_app.engine.attention.gather_backends import CAUSAL, GatheredVarlen
from serve_app.engine.attention.page_table import PageTable, plan_pages
from serve_app.engine.attention.paging import KvPool, PagedStep, write_kv
from serve_app.engine.step import Segment


class PagedVarlen:
    """A kernel that follows block tables itself: decode and prefill in one call, nothing copied."""

    name = "fa3_torch"
    in_graphs = True

    def __init__(self, varlen_attn: Callable[..., torch.Tensor]) -> None:
        self._varlen_attn = varlen_attn

    def plan(self, pool: KvPool, segments: Sequence[Segment], rows: int = 0) -> PagedStep:
        """Plan a step; see ``AttentionBackend``."""
        return plan_pages(pool, segments, self, rows)

    def attend(
        self, step: PagedStep, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Write ``key`` and ``value``, attend ``query``; see ``AttentionBackend``."""
        write_kv(step, layer, key, value)
        pages: PageTable = step.plan
        pool = step.pool
        keys, values = (
            slots.view(-1, pool.block_size, *slots.shape[1:]) for slots in (pool.keys[layer], pool.values[layer])
        )
        return self._varlen_attn(
            query,
            keys,
            values,
            pages.cu_rows,
            None,
            pages.most_rows,
            pages.most_tokens,
            scale=scale,
            window_size=CAUSAL,
            enable_gqa=query.shape[1] != keys.shape[2],
            seqused_k=pages.lengths,
            block_table=pages.blocks,
        )


def fa3_through_torch() -> PagedVarlen:
    """FlashAttention 3 behind ``torch.nn.attention.varlen``. Raises ImportError where either is missing.

    Makes FA3 torch's flash attention in this process until ``restore_torch_flash``.
    """
    varlen = importlib.import_module("torch.nn.attention.varlen")
    importlib.import_module("torch.nn.attention").activate_flash_attention_impl("FA3")
    return PagedVarlen(varlen.varlen_attn)


def restore_torch_flash() -> None:
    """Undo what ``fa3_through_torch`` did to this process."""
    attention = importlib.import_module("torch.nn.attention")
    if attention.current_flash_attention_impl() is not None:
        attention.restore_flash_attention_impl()


def varlen_through_torch() -> GatheredVarlen:
    """The FlashAttention 2 that torch carries, over copied KV. Raises ImportError where torch has no varlen."""
    return GatheredVarlen("varlen_torch", importlib.import_module("torch.nn.attention.varlen").varlen_attn)
