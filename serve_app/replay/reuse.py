"""The working set of a replay: what routers would report as blocks that are reused again and again."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

SLICE_S, SLICES, REUSED = 60.0, 5, 3
"""As routers count it: reused so often in the last five minutes. Source: ``WorkingSet`` in router/observe.py."""


class ReusedSegments:
    """Counts how often each segment is found, by minutes. ``sizes``: blocks by segment."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._slices: deque[tuple[float, Counter[int]]] = deque(maxlen=SLICES)

    def add(self, path: Sequence[int], blocks: int, now_s: float) -> None:
        """Record that a request finds the first ``blocks`` of its path somewhere."""
        if not self._slices or now_s >= self._slices[-1][0]:
            self._slices.append((now_s + SLICE_S, Counter()))
        counts = self._slices[-1][1]
        for segment in path:
            if blocks <= 0:
                break
            counts[segment] += 1
            blocks -= self._sizes[segment]

    def blocks(self, now_s: float) -> int:
        """Return the blocks of the segments that count."""
        uses = Counter[int]()
        for ends_s, counts in self._slices:
            if ends_s > now_s - SLICE_S * (SLICES - 1):
                uses.update(counts)
        return int(sum(self._sizes[segment] for segment, count in uses.items() if count >= REUSED))
