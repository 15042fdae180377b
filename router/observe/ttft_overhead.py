"""What a first token takes beside the work that the router knows of: calls, the step under way, a step's own cost.

One constant for all replicas, learned from what came. It changes no order of replicas, so no decision: it makes the
times that are shown those that clients see. Seconds. Not thread-safe.
"""

from __future__ import annotations

from collections import deque
from statistics import median

WINDOW = 64
"""Requests that it is learned from, the latest ones."""

LEAST = 8
"""With fewer it is 0: the first requests also pay for connections and kernels."""


class TtftOverhead:
    """The median of actual time - work, over the quarter of the latest requests that had the least work.

    Of those with more work the difference says how good the prefill rate is, and would drown what is the same for all.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._latest: deque[tuple[float, float]] = deque(maxlen=WINDOW)

    def add(self, work_s: float, ttft_s: float) -> None:
        """Learn from one first token. ``work_s``: what was estimated of it without this overhead."""
        self._latest.append((work_s, ttft_s - work_s))
        if len(self._latest) >= LEAST:
            least_s = sorted(work_s for work_s, _ in self._latest)[len(self._latest) // 4 - 1]
            # All with as little work, not the quickest of them.
            self.seconds = max(0.0, median(beyond_s for work_s, beyond_s in self._latest if work_s <= least_s))
