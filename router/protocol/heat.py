"""How hits fade: hot is what is used, and used lately."""

import math

HEAT_MEMORY_S = 600.0
"""A hit counts 1/e as much after this time."""


def faded(hits: float, used_s: float, now_s: float) -> float:
    """Return what hits count at ``now_s`` that counted ``hits`` at ``used_s``."""
    return hits * math.exp((used_s - now_s) / HEAT_MEMORY_S)
