"""Products with weights laid out once, as the kernel reads them: our AMX kernel, or oneDNN.

Which of them works here is found by trying. For bfloat16 on CPUs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch

from serve_app.engine.cpu.amx.library import LINEAR_DIM, AmxLinear, load_linear
from serve_app.engine.step import ceil_div

_log = logging.getLogger(__name__)

INPUT_MULTIPLE = LINEAR_DIM
"""Our kernel multiplies rows whose length is a multiple of this; the weights' owner may pad them with zeros."""

_HINT_ROWS = 16
_CLOSE = 0.05

Product = Callable[[torch.Tensor], torch.Tensor]
"""[..., in] to [..., out], both bfloat16."""

Pack = Callable[[torch.Tensor, torch.Tensor | None], Product]
"""(weight [out, in], bias [out] or None) to their product."""


class AmxProduct:
    """By our own kernel, which takes few rows as fast as the weights come from memory."""

    def __init__(self, library: AmxLinear, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Pack ``weight``, whose inputs are a multiple of ``LINEAR_DIM``."""
        self._library = library
        self._out, self._in = weight.shape
        weight = weight.contiguous()
        self._packed = torch.empty(ceil_div(self._out, LINEAR_DIM) * LINEAR_DIM * self._in, dtype=torch.bfloat16)
        library.pack(weight.data_ptr(), self._packed.data_ptr(), self._out, self._in)
        self._bias = None if bias is None else bias.float().contiguous()
        self._addresses = (self._packed.data_ptr(), None if self._bias is None else self._bias.data_ptr())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product. Raises TypeError for other rows than it multiplies, and MemoryError."""
        if x.dtype is not torch.bfloat16 or x.shape[-1] != self._in:
            raise TypeError(f"rows of {self._in} bfloat16 numbers are wanted, not {x.dtype} {tuple(x.shape)}")
        x = x.contiguous()
        output = torch.empty((*x.shape[:-1], self._out), dtype=torch.bfloat16)
        rows = x.numel() // self._in
        if rows and self._library.linear(x.data_ptr(), *self._addresses, output.data_ptr(), rows, self._in, self._out):
            raise MemoryError("no memory for a product's rows")
        return output


class OneDnnProduct:
    """By oneDNN, over weights packed once; torch hands it plain ones, which it lays out anew in every call."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Raises AttributeError or RuntimeError where torch lacks the operators: they are not public."""
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _HINT_ROWS)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product."""
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self._weight, self._bias, "none", [], "")
        return output


def choose_packing() -> Pack | None:
    """Return the fastest packing that works here, None where there is none."""
    return amx_packing() or _working("onednn", lambda: OneDnnProduct)


def amx_packing() -> Pack | None:
    """Return the packing of our own kernel, to which any number of rows is the same; None where it does not work."""
    return _working("amx", _amx)


def _working(name: str, make: Callable[[], Pack]) -> Pack | None:
    try:
        pack = make()
        if _right(pack):
            return pack
        reason = "wrong results"
    except (AttributeError, RuntimeError) as error:
        reason = str(error)
    _log.info("linear layers are not packed for %s: %s", name, reason)
    return None


def _amx() -> Pack:
    library = load_linear()

    def pack(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
        if weight.shape[1] % LINEAR_DIM:
            return partial(torch.nn.functional.linear, weight=weight, bias=bias)
        return AmxProduct(library, weight, bias)

    return pack


@torch.inference_mode()
def _right(pack: Pack) -> bool:
    """Whether products are torch's own, with a bias and without, for a few rows and for more than a block of them."""
    for out, wide, rows in ((80, 64, 5), (32, 416, 300)):
        layer = torch.nn.Linear(wide, out, bias=rows == 5, dtype=torch.bfloat16)
        x = torch.randn(1, rows, wide, dtype=torch.bfloat16)
        found = pack(layer.weight.detach(), None if layer.bias is None else layer.bias.detach())(x)
        if not torch.allclose(found.float(), layer(x).float(), rtol=_CLOSE, atol=_CLOSE):
            return False
    return True
