"""Host arrays onto the device, all of a step's in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from serve_app.engine.step import ceil_div

_ALIGNMENT = 16
"""Every array starts at a multiple of this in the one that is copied: as its own dtype on the device needs it."""

Array = np.ndarray[Any, np.dtype[Any]]


def upload(arrays: Sequence[Array], device: torch.device) -> list[torch.Tensor]:
    """Return the arrays as tensors on ``device``; off the CPU by one copy that does not wait for the device."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return packed_upload(arrays, device, pin_memory=device.type == "cuda")


def packed_upload(arrays: Sequence[Array], device: torch.device, *, pin_memory: bool) -> list[torch.Tensor]:
    """Return the arrays as views of one byte tensor on ``device``.

    The pinned memory is torch's to reuse, which it does only after the copy.
    """
    starts, total = [], 0
    for array in arrays:
        starts.append(total)
        total += ceil_div(array.nbytes, _ALIGNMENT) * _ALIGNMENT
    host = torch.empty(max(total, 1), dtype=torch.uint8, pin_memory=pin_memory)
    raw = host.numpy()
    for start, array in zip(starts, arrays, strict=True):
        raw[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    there = host.to(device, non_blocking=True)
    return [
        there[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]
