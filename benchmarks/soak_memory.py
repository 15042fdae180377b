"""What a process keeps: resident memory and its slope, and which tables have grown.

Knows nothing of engines; a sample is what is resident once Python's and malloc's own leftovers are given back.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

BOUNDED = (
    *("table Quota._line", "table Account.leaves", "table Pins._expiries"),
    *("AdapterSlots", "LoraPair", "table LoraLayers", "_Bundle", "table _Bundle", "_Stack", "table AdapterSlots"),
)
"""Sizes that go up and down within bounds of their own: lines that drop stale entries once those are the most, and what
belongs to adapters, whose number the audit checks."""


def grown(checks: Sequence[Mapping[str, int]]) -> dict[str, tuple[int, int]]:
    """Return the tables that are half as large again, and more, as they ever were in the first half of the checks."""
    before, last = checks[: (len(checks) + 1) // 2], checks[-1]
    most = {name: max(check.get(name, 0) for check in before) for name in last}
    return {
        name: (most[name], size)
        for name, size in last.items()
        if size > 1.5 * most[name] + 64 and not name.startswith(BOUNDED)
    }


def trimmed_resident_bytes() -> int:
    """Return this process's resident memory, without what its allocators would give back."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def slope(samples: Sequence[tuple[float, int]], block_s: float = 10.0, warm_up: float = 1 / 3) -> dict[str, Any]:
    """Fit a line through (seconds, bytes) after a warm-up: KB a minute, with a 95 % interval.

    Means over ``block_s`` seconds are fitted, because neighbouring samples are not independent.
    """
    end_s = samples[-1][0]
    after = [(t, size) for t, size in samples if t >= warm_up * end_s]
    blocks: dict[int, list[int]] = {}
    for t, size in after:
        blocks.setdefault(int(t // block_s), []).append(size)
    x = np.array([block_s * (number + 0.5) / 60 for number in blocks])
    y = np.array([np.mean(sizes) / 1024 for sizes in blocks.values()])
    figures: dict[str, Any] = {
        "after_warm_up_mb": after[0][1] / 2**20,
        "end_mb": after[-1][1] / 2**20,
        "most_mb": max(size for _, size in samples) / 2**20,
        "minutes": end_s / 60,
    }
    if len(x) < 4:
        return figures
    centred = x - x.mean()
    kb_per_min = float(centred @ y / (centred @ centred))
    residual = y - y.mean() - kb_per_min * centred
    error = float(np.sqrt(residual @ residual / (len(x) - 2) / (centred @ centred)))
    return {**figures, "kb_per_min": kb_per_min, "interval": [kb_per_min - 2.1 * error, kb_per_min + 2.1 * error]}
