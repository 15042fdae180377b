"""How much a step prefills: what fits a tenth of a second, because whoever comes in the meantime waits for its end.

A pure function of measured rates; knows no sequences.
"""

from __future__ import annotations

import sys

STEP_S = 0.1
"""What the prefill of a step should take at most."""

LEAST_STEP_TOKENS = 512
"""Smaller steps make prefill dearer: weights are read once a step."""


def prefill_tokens(prefill_tokens_per_s: float) -> int:
    """Return the tokens that the next step may prefill; any number while nothing is known of the rate (0.0)."""
    if prefill_tokens_per_s <= 0.0:
        return sys.maxsize
    return max(LEAST_STEP_TOKENS, int(prefill_tokens_per_s * STEP_S))
