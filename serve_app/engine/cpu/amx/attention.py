"""Attention by a kernel of our own on CPUs with AMX: the pool is read where it lies, one call a layer.

``jobs`` plans which rows attend to which keys; ``attention.c`` computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from serve_app.engine.attention.paging import Heads, KvPool, PagedStep
from serve_app.engine.attention.step_layout import lay_out, singles_first, upload_step
from serve_app.engine.cpu.amx.jobs import Sizes, plan_jobs
from serve_app.engine.cpu.amx.library import AmxAttention, HeadRows, NoAmx, load_attention
from serve_app.engine.step import Segment


@dataclass(frozen=True, slots=True)
class _Planned:
    """A step's plan, positions and partial results: their addresses, and the objects that keep them alive."""

    addresses: tuple[int, int, int]
    kept: tuple[object, ...]


class AmxBackend:
    """Serves bfloat16 pools whose sizes suit the tiles. Used by one thread at a time."""

    name = "amx"
    in_graphs = False

    def __init__(self, library: AmxAttention, group: int) -> None:
        self._library = library
        self._group = group
        self._partials = torch.empty(0)

    def plan(self, pool: KvPool, segments: Sequence[Segment], rows: int = 0) -> PagedStep:
        """Plan a step; see ``AttentionBackend``."""
        layout = lay_out(segments, singles_first(segments), pool.block_size, blank_rows=True)
        step, _ = upload_step(pool, layout, self)
        kv_heads, head_dim = pool.keys[0].shape[1:]
        sizes = Sizes(
            pool.block_size, self._library.lanes, self._library.few, kv_heads, self._group, torch.get_num_threads()
        )
        plan = plan_jobs(layout.segments, step.input_ids.shape[1], sizes)
        needed = plan.places * kv_heads * self._group * (head_dim + 1)
        if self._partials.numel() < needed:
            self._partials = torch.empty(needed)
        addresses = (plan.words.ctypes.data, step.position_ids.data_ptr(), self._partials.data_ptr())
        return replace(step, plan=_Planned(addresses, (plan.words, self._partials)))

    def attend(
        self, step: PagedStep, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Write ``key`` and ``value``, attend ``query``; see ``AttentionBackend``."""
        # Addresses carry no type: what the kernel would misread stops here.
        if {query.dtype, key.dtype, value.dtype} != {torch.bfloat16}:
            raise TypeError(f"the AMX kernel takes bfloat16, not {query.dtype}, {key.dtype}, {value.dtype}")
        planned: _Planned = step.plan
        keys, values = step.pool.keys[layer], step.pool.values[layer]
        # Contiguous copies have to live until the call is over.
        heads = [rows if rows.stride(2) == 1 else rows.contiguous() for rows in (query, key, value)]
        out = torch.empty(query.shape, dtype=query.dtype)
        self._library.attend(
            *(HeadRows(rows.data_ptr(), rows.stride(0), rows.stride(1)) for rows in heads),
            step.slots.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            out.data_ptr(),
            *planned.addresses,
            keys.shape[1],
            self._group,
            step.pool.block_size,
            scale,
        )
        return out


def amx_backend(heads: Heads) -> AmxBackend:
    """Return the backend for a model and pool of these sizes. Raises NoAmx."""
    if heads.dtype != torch.bfloat16:
        raise NoAmx(f"it computes bfloat16, not {str(heads.dtype).removeprefix('torch.')}")
    library = load_attention(heads.dim, heads.block_size)
    group = heads.query // heads.kv
    if group > library.lanes:
        raise NoAmx(f"{heads.query} heads over {heads.kv} are more than {library.lanes} lanes")
    return AmxBackend(library, group)
