"""How fast this replica copies KV from others, in tokens per second, set-up and waiting included.

Owns the decayed sums. Knows nothing of calls or blocks. Starts at a cautious expectation and goes back to it with
time, so that a link that once was slow is tried again.
"""

from __future__ import annotations

import math

EXPECTED_BYTES_PER_S = 150e6
"""Of a pull of some megabytes between two processes of one machine, while nothing was measured (see ``LOG.md``)."""

_EXPECTED_WEIGHT_S = 0.1
_MEMORY_S = 60.0


class PullRate:
    """Tokens and seconds of past pulls, halved every 40 seconds or so."""

    def __init__(self, block_size: int, block_bytes: int) -> None:
        self._expected = EXPECTED_BYTES_PER_S / max(block_bytes, 1) * block_size
        self._tokens = 0.0
        self._seconds = 0.0
        self._at_s = 0.0

    def observe(self, tokens: int, duration_s: float, now_s: float) -> None:
        """Take a pull into account; one that failed for being late brought 0 tokens, or few."""
        kept = self._kept(now_s)
        self._tokens = self._tokens * kept + tokens
        self._seconds = self._seconds * kept + duration_s
        self._at_s = now_s

    def tokens_per_s(self, now_s: float) -> float:
        """Return the rate as it is believed to be, in two significant digits, so that reports of it rarely change."""
        kept = self._kept(now_s)
        tokens = self._tokens * kept + self._expected * _EXPECTED_WEIGHT_S
        seconds = self._seconds * kept + _EXPECTED_WEIGHT_S
        return float(f"{tokens / seconds:.2g}")

    def _kept(self, now_s: float) -> float:
        return math.exp(-max(now_s - self._at_s, 0.0) / _MEMORY_S)
