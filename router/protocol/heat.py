"""The decay of hits over time, so that frequent and recent use makes a prefix hot."""

import math

HEAT_MEMORY_S = 600.0
"""A hit counts 1/e as much after this time."""


def faded(hits: float, used_s: float, now_s: float) -> float:
    """Return the value at ``now_s`` of hits that had the value ``hits`` at ``used_s``."""
    return hits * math.exp((used_s - now_s) / HEAT_MEMORY_S)
