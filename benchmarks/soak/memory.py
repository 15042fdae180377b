"""What a process keeps: its memory taken apart, how that grows, and which tables have grown.

Knows nothing of engines. A sample is taken once what nobody uses is given back, as far as allocators do. What stays
resident and is used by nobody is no leak, so both are told.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
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


@dataclass(frozen=True, slots=True)
class MemorySample:
    """This process's memory at one moment.

    ``heap_bytes``: what was allocated with malloc and not freed, in its arenas; ``mapped_bytes``: the same of large
    pieces, which have a mapping of their own; both are 0 where malloc does not say. ``python_blocks``: small Python
    objects alive, whose memory is in ``resident_bytes`` alone.
    """

    at_s: float
    resident_bytes: int
    heap_bytes: int
    mapped_bytes: int
    python_blocks: int

    @classmethod
    def take(cls, at_s: float) -> MemorySample:
        """Look, after giving back what nobody uses."""
        gc.collect()
        libc = ctypes.CDLL(None)
        heap_bytes = mapped_bytes = 0
        if hasattr(libc, "malloc_trim") and hasattr(libc, "mallinfo2"):  # glibc
            libc.malloc_trim(0)
            libc.mallinfo2.restype = _MallInfo
            said = libc.mallinfo2()
            heap_bytes, mapped_bytes = said.uordblks, said.hblkhd
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return cls(at_s, resident, heap_bytes, mapped_bytes, sys.getallocatedblocks())


class _MallInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    )


def memory_figures(samples: Sequence[MemorySample]) -> dict[str, Any]:
    """Return how each part of memory grew (see ``slope``), and the samples themselves, for growth may come in steps."""

    def line(part: Callable[[MemorySample], int]) -> dict[str, Any]:
        return slope([(sample.at_s, part(sample)) for sample in samples])

    blocks = [sample.python_blocks for sample in samples]
    return {
        "resident": line(lambda sample: sample.resident_bytes),
        "malloc_heap": line(lambda sample: sample.heap_bytes),
        "malloc_mapped": line(lambda sample: sample.mapped_bytes),
        "python_blocks": {"half_time": blocks[len(blocks) // 2], "end": blocks[-1]},
        "samples": [asdict(sample) for sample in samples],
    }


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
