"""A model's forward compiled by torch's inductor for a CPU: one kernel where plain PyTorch runs ten operations.

Owns the compiled function, the operators through which it calls back for what stays ours (attention over the pool,
packed products), and the check at load that it computes what the plain forward does. Needs a C++ compiler. Knows
nothing of scheduling, and nothing of adapters: their hooks need the plain forward.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import torch

from serve_app.engine.attention.interface import paged_attention
from serve_app.engine.attention.paging import AttentionBackend, KvPool, PagedStep
from serve_app.engine.cpu.packed_linears import PackedLinear
from serve_app.engine.protocol import SamplingParams
from serve_app.engine.step import Segment, block_runs, ceil_div

_LEAST = 2
"""Dynamo compiles sizes of 0 and 1 apart; steps are padded instead."""

_CLOSE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}
"""How far the compiled logits may be from the plain ones, as a part of their norm."""


class NotCompiled(ValueError):
    """The model cannot be compiled here; the message says why and what to change."""


class CompiledForward:
    """The compiled forward of one model. Used by one thread at a time."""

    def __init__(self, model: torch.nn.Module, linears: Sequence[PackedLinear]) -> None:
        self._model = model
        self._linears = linears
        # Nothing but the inputs' shapes ever changes between calls; looking at every module took 0.6 ms a step.
        guards: dict[str, Any] = {"guard_filter_fn": torch.compiler.keep_tensor_guards_unsafe}
        # Code of its own: what is compiled belongs to the code, and without guards another model's would be taken.
        code = _logits.__code__.replace(co_name=f"_logits_{next(_numbers)}")
        self._compiled = torch.compile(FunctionType(code, globals()), dynamic=True, fullgraph=True, options=guards)

    def __call__(self, step: PagedStep) -> torch.Tensor:
        """Compute a step, write its KV, and return the float32 logits [len(step.logit_rows), vocab]."""
        ids, positions = step.input_ids, step.position_ids
        missing = max(_LEAST - ids.shape[1], 0)
        if missing:
            ids, positions = (torch.nn.functional.pad(given, (0, missing)) for given in (ids, positions))
        rows = torch.nn.functional.pad(step.logit_rows, (0, max(_LEAST - len(step.logit_rows), 0)))
        _current.step, _current.linears = step, self._linears
        try:
            logits: torch.Tensor = self._compiled(self._model, ids, positions, rows)
        finally:
            _current.step = None
        return logits[: len(step.logit_rows)]


def _logits(model: torch.nn.Module, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    output = model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=rows)
    logits: torch.Tensor = output.logits[0].float()
    return logits


_numbers = count()


@torch.inference_mode()
def compile_forward(
    model: torch.nn.Module, linears: Sequence[PackedLinear], pool: KvPool, backend: AttentionBackend
) -> CompiledForward:
    """Compile ``model``'s forward, which takes a good part of a minute the first time, and check it on a small step.

    ``pool`` must be empty and is so again afterwards. Raises NotCompiled.
    """
    forward = CompiledForward(model, linears)
    step, used = _small_step(pool, backend)
    plain = model(
        input_ids=step.input_ids,
        position_ids=step.position_ids,
        use_cache=False,
        logits_to_keep=step.logit_rows,
        paged=step,
    ).logits[0]
    try:
        Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).mkdir(mode=0o700, parents=True, exist_ok=True)
        found = forward(step)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]
        raise NotCompiled(
            f"compile_model needs a C++ compiler (g++) and failed here; leave it out: {reason}"
        ) from error
    pool.tensor[:, :, :used].zero_()
    off = float((found - plain.float()).norm() / plain.float().norm())
    if not off <= _CLOSE[pool.tensor.dtype]:
        raise NotCompiled(f"compile_model: the compiled model is off by {off:.3g} of its logits; leave it out")
    return forward


def _small_step(pool: KvPool, backend: AttentionBackend) -> tuple[PagedStep, int]:
    """Return a step of a chunk and two single tokens, sizes all different, and how many blocks it writes to."""
    chunk = list(range(ceil_div(5, pool.block_size)))
    cases = [(5, chunk), (1, [len(chunk)]), (1, [len(chunk) + 1])]
    segments = [
        Segment(np.arange(1, new + 1, dtype=np.int32), 0, blocks, block_runs(blocks), SamplingParams(1))
        for new, blocks in cases
    ]
    return backend.plan(pool, segments), len(chunk) + 2


class _Current(threading.local):
    """What the operators below work on: the step that this thread computes, and the model's packed products."""

    step: PagedStep | None = None
    linears: Sequence[PackedLinear] = ()


_current = _Current()


class _Layer:
    """What ``paged_attention`` reads of an attention module."""

    def __init__(self, index: int) -> None:
        self.layer_idx = index


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, scale: float) -> torch.Tensor:
    assert _current.step is not None
    module: torch.nn.Module = _Layer(layer)  # type: ignore[assignment]
    return paged_attention(module, query, key, value, None, paged=_current.step, scaling=scale)[0].contiguous()


def _attend_shape(query: torch.Tensor, *_: object) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], query.shape[3])


def _product(given: torch.Tensor, number: int, width: int) -> torch.Tensor:
    return _current.linears[number].product(given)


def _product_shape(given: torch.Tensor, number: int, width: int) -> torch.Tensor:
    return given.new_empty(*given.shape[:-1], width)


_library: Any = torch.library.Library("warmpath", "DEF")  # type: ignore[no-untyped-call]
for _schema, _run, _shape in (
    ("attend(Tensor query, Tensor key, Tensor value, int layer, float scale) -> Tensor", _attend, _attend_shape),
    ("packed_product(Tensor given, int number, int width) -> Tensor", _product, _product_shape),
):
    _name = _library.define(_schema)
    _library.impl(_name, _run, "CPU")
    torch.library.register_fake(f"warmpath::{_name}", _shape, lib=_library)
