"""Random numbers by position: from (seed, position) alone, never from the batch or from earlier draws."""

MASK = (1 << 64) - 1
STRIDE = 0x9E3779B97F4A7C15
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""The increment and the multipliers of splitmix64."""


def position_key(seed: int, position: int) -> int:
    """Return 64 bits of (seed, position): two rounds of splitmix64 over both."""
    return _mix((seed & MASK) ^ _mix(position & MASK))


def position_uniform(seed: int, position: int) -> float:
    """Return a uniform number in [0, 1) from (seed, position)."""
    return (position_key(seed, position) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value + STRIDE) & MASK
    value = ((value ^ (value >> 30)) * FACTORS[0]) & MASK
    value = ((value ^ (value >> 27)) * FACTORS[1]) & MASK
    return value ^ (value >> 31)
