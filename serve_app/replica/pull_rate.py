"""The rate of a replica's pulls, as measured: what routers are told, and what a simulated replica tells."""

import math

from router.protocol.samples import Rate

EXPECTED_BYTES_PER_S = 6e9
"""Assumed rate of a pull until measured: above all rates seen, so that a first pull is tried and the rate known.

If that one is slow, it ends when computing would have ended, and the next is tried when it is all but forgotten.
"""

_EXPECTED_WEIGHT_S = 0.01
_MEMORY_S = 60.0


def expected_tokens_per_s(block_size: int, block_bytes: int) -> float:
    """Return the assumed rate. ``block_bytes``: of a block's KV."""
    return EXPECTED_BYTES_PER_S / max(block_bytes, 1) * block_size


class PullRate:
    """Tokens and seconds of past pulls, halved about every 40 seconds. ``expected``: tokens a second until then."""

    def __init__(self, expected: float) -> None:
        self._expected = expected
        self._rate = Rate()
        self._at_s = 0.0

    def observe(self, tokens: int, duration_s: float, now_s: float) -> None:
        """Add a pull; one that was too late brought few tokens, or 0."""
        self._rate = self._rate.then(tokens, duration_s, self._kept(now_s))
        self._at_s = now_s

    def tokens_per_s(self, now_s: float) -> float:
        """Return the estimated rate in two significant digits, so that reports of it rarely change."""
        rate = self._rate.then(self._expected * _EXPECTED_WEIGHT_S, _EXPECTED_WEIGHT_S, self._kept(now_s))
        return float(f"{rate.per_s:.2g}")

    def _kept(self, now_s: float) -> float:
        return math.exp(-max(now_s - self._at_s, 0.0) / _MEMORY_S)
